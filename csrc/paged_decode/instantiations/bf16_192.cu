#include "paged_decode/launcher.cuh"

namespace pagedkern {

PAGEDKERN_PAGED_DECODE(kBFloat16, 192)

}  // namespace pagedkern
