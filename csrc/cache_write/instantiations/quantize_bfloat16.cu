#include "cache_write/instantiations/plain.cuh"

namespace pagedkern {

Status launch_quantize_bfloat16(const CacheWriteKernelParams& params, void* stream) {
  return launch_quantize<__nv_bfloat16>(params, stream);
}

}  // namespace pagedkern
