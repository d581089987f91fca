#include "cache_write/instantiations/rope.cuh"

namespace pagedkern {

Status launch_rope_bfloat16(const RopeKernelParams& params, void* stream) {
  return launch_rope<__nv_bfloat16>(params, stream);
}

Status launch_rope_reshape_and_cache(const CacheWriteParams& params, const RopeParams& rope, void* stream) {
  if (params.num_slots == 0) return {};
  RopeKernelParams p = {};
  static_cast<CacheWriteParams&>(p) = params;
  p.rope = rope;
  // Runs of neox halves are 8 elements: two lanes together have 16, where each half begins on an access of 16.
  p.trade = is_fp8(p.cache.dtype) && !rope.interleaved && rope.rotary_dim % 32 == 0;
  return p.dtype == DType::kBFloat16 ? launch_rope_bfloat16(p, stream) : launch_rope_float16(p, stream);
}

}  // namespace pagedkern
