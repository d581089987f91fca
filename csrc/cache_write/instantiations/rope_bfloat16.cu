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
  // Halves of the rotated part, of the rest and of a value are multiples of 16 then, so that no pair of lanes lies
  // across two of them.
  p.trade = is_fp8(p.cache.dtype) && rope.rotary_dim % 32 == 0 && p.cache.head_dim % 32 == 0;
  return p.dtype == DType::kBFloat16 ? launch_rope_bfloat16(p, stream) : launch_rope_float16(p, stream);
}

}  // namespace pagedkern
