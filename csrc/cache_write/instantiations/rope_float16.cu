#include "cache_write/instantiations/rope.cuh"

namespace pagedkern {

Status launch_rope_float16(const RopeKernelParams& params, void* stream) {
  return launch_rope<__half>(params, stream);
}

}  // namespace pagedkern
