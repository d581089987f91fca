#include "paged_decode/launcher.cuh"

namespace pagedkern {

PAGEDKERN_PAGED_DECODE(kFloat8E5M2, 128)

}  // namespace pagedkern
