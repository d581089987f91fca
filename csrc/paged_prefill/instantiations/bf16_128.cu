#include "paged_prefill/launcher.cuh"

namespace pagedkern {

template Status launch_paged_prefill_instance<DType::kBFloat16, false, 128>(const PagedPrefillParams&, void*);

}  // namespace pagedkern
