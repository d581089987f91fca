#include "paged_decode/launcher.cuh"

namespace pagedkern {

PAGEDKERN_PAGED_DECODE(kFloat8E4M3, 192)

}  // namespace pagedkern
