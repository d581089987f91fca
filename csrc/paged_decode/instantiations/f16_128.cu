#include "paged_decode/launcher.cuh"

namespace pagedkern {

PAGEDKERN_PAGED_DECODE(kFloat16, 128)

}  // namespace pagedkern
