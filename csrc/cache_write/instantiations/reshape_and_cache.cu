#include "cache_write/instantiations/plain.cuh"

namespace pagedkern {
namespace {

Status launch_copy(const CacheWriteKernelParams& params, void* stream) {
  switch (std::min(source_width(params), cache_width(params))) {
    case 16: return launch_plain<CopyRow<8>>(params, stream);
    case 8: return launch_plain<CopyRow<4>>(params, stream);
    case 4: return launch_plain<CopyRow<2>>(params, stream);
    default: return launch_plain<CopyRow<1>>(params, stream);
  }
}

}  // namespace

Status launch_reshape_and_cache(const CacheWriteParams& params, void* stream) {
  if (params.num_slots == 0) return {};
  CacheWriteKernelParams p = {};
  static_cast<CacheWriteParams&>(p) = params;
  merge_heads(p);
  if (!is_fp8(p.cache.dtype)) return launch_copy(p, stream);
  return p.dtype == DType::kBFloat16 ? launch_quantize_bfloat16(p, stream) : launch_quantize_float16(p, stream);
}

}  // namespace pagedkern
