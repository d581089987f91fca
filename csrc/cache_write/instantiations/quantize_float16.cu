#include "cache_write/instantiations/plain.cuh"

namespace pagedkern {

Status launch_quantize_float16(const CacheWriteKernelParams& params, void* stream) {
  return launch_quantize<__half>(params, stream);
}

}  // namespace pagedkern
