#include "cache_write/dynamic_kernel.cuh"
#include "cache_write/launcher.cuh"
#include "cache_write/launcher.h"

namespace pagedkern {
namespace {

template <class T, class Format, int kCount, int kParts>
Status launch_share(CacheWriteKernelParams p, void* stream) {
  p.lanes_of_row = 2;  // two lanes trade
  while (p.lanes_of_row < 32 && p.lanes_of_row * kCount * kParts < p.cache.head_dim) p.lanes_of_row *= 2;
  p.heads = FastDivide(static_cast<uint32_t>(p.cache.num_kv_heads));
  const LaunchConfig config = team_grid(p, static_cast<int64_t>(p.cache.num_kv_heads) * p.lanes_of_row);
  return launch(reshape_and_cache_dynamic_kernel<T, Format, kCount, kParts>, config, p,
                static_cast<cudaStream_t>(stream));
}

template <class T, class Format>
Status launch_format(const CacheWriteKernelParams& p, void* stream) {
  const int source = source_width(p), cache = cache_width(p);
  if (source == 16 && cache == 16) return launch_share<T, Format, 8, 2>(p, stream);
  if (source == 16 && cache >= 8) return launch_share<T, Format, 8, 1>(p, stream);
  return launch_share<T, Format, 1, 8>(p, stream);
}

template <class T>
Status launch_from(const CacheWriteKernelParams& p, void* stream) {
  return p.cache.dtype == DType::kFloat8E4M3 ? launch_format<T, E4M3>(p, stream) : launch_format<T, E5M2>(p, stream);
}

}  // namespace

Status launch_reshape_and_cache_dynamic(const CacheWriteParams& params, void* stream) {
  if (params.num_slots == 0) return {};
  CacheWriteKernelParams p = {};
  static_cast<CacheWriteParams&>(p) = params;
  return p.dtype == DType::kBFloat16 ? launch_from<__nv_bfloat16>(p, stream) : launch_from<__half>(p, stream);
}

}  // namespace pagedkern
