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

// Where the heads of a token lie end to end on every side and share a scale, they are one head.
void merge_heads(CacheWriteKernelParams& p) {
  const int64_t head_dim = p.cache.head_dim;
  const auto joined = [&](int64_t stride_head, const PagedCache& cache, const KvScale& scale) {
    return stride_head == head_dim && cache.stride_head == head_dim &&
           (scale.data == nullptr || scale.stride_head == 0);
  };
  if (!joined(p.key_stride_head, p.key_cache, p.k_scale) || !joined(p.value_stride_head, p.value_cache, p.v_scale)) {
    return;
  }
  if (head_dim * p.cache.num_kv_heads > kMaxRow) return;
  p.cache.head_dim *= p.cache.num_kv_heads;
  p.cache.num_kv_heads = 1;
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
