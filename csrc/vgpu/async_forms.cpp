#include "vgpu/async_forms.h"

namespace pagedkern::vgpu {
namespace {

void register_all(Registry& registry) {
  register_copy_forms(registry);
  register_bulk_forms(registry);
  register_mbarrier_forms(registry);
  register_tma_forms(registry);
  register_policy_forms(registry);
}

}  // namespace

// These families do not depend on the SIMD level their callers were compiled for.
namespace generic {
void register_async(Registry& registry) {
  register_all(registry);
}
}  // namespace generic
namespace avx2 {
void register_async(Registry& registry) {
  register_all(registry);
}
}  // namespace avx2

}  // namespace pagedkern::vgpu
