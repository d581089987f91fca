#include "paged_prefill/launcher.cuh"

namespace pagedkern {

template Status launch_paged_prefill_instance<DType::kFloat16, false, 96>(const PagedPrefillParams&, void*);
template Status launch_paged_prefill_instance<DType::kFloat16, true, 96>(const PagedPrefillParams&, void*);

}  // namespace pagedkern
