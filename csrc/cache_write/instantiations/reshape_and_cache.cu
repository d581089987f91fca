#include <algorithm>

#include "cache_write/kernel.cuh"
#include "cache_write/launcher.h"
#include "common/launch.h"

namespace pagedkern {
namespace {

template <class Row>
Status launch_row(const CacheWriteParams& params, void* stream) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(std::min<int64_t>(params.num_slots, CacheWriteConfig::kMaxBlocks)));
  config.block = dim3(CacheWriteConfig::kThreads);
  return launch(reshape_and_cache_kernel<Row>, config, params, static_cast<cudaStream_t>(stream));
}

// The widest access that key and value, rows of 2-byte elements, allow.
int source_width(const CacheWriteParams& p) {
  return AccessWidth()
      .pointer(p.key)
      .pointer(p.value)
      .bytes(2 * p.key_stride_token)
      .bytes(2 * p.key_stride_head)
      .bytes(2 * p.value_stride_token)
      .bytes(2 * p.value_stride_head)
      .bytes(2 * static_cast<int64_t>(p.cache.head_dim))
      .width();
}

int cache_width(const CacheWriteParams& p) {
  AccessWidth width;
  const int64_t size = size_of(p.cache.dtype);
  for (const PagedCache* cache : {&p.key_cache, &p.value_cache}) {
    width.pointer(cache->data)
        .bytes(size * cache->stride_block)
        .bytes(size * cache->stride_token)
        .bytes(size * cache->stride_head);
  }
  return width.bytes(size * p.cache.head_dim).width();
}

template <class T, class Format>
Status launch_quantize(const CacheWriteParams& params, void* stream) {
  constexpr int kWide = CacheWriteConfig::kFp8Elements;
  if (source_width(params) >= 2 * kWide && cache_width(params) >= kWide) {
    return launch_row<QuantizeRow<T, Format, kWide>>(params, stream);
  }
  return launch_row<QuantizeRow<T, Format, 1>>(params, stream);
}

template <class T>
Status launch_from(const CacheWriteParams& params, void* stream) {
  return params.cache.dtype == DType::kFloat8E4M3 ? launch_quantize<T, E4M3>(params, stream)
                                                  : launch_quantize<T, E5M2>(params, stream);
}

}  // namespace

Status launch_reshape_and_cache(const CacheWriteParams& params, void* stream) {
  if (params.num_slots == 0) return {};
  if (is_fp8(params.cache.dtype)) {
    return params.dtype == DType::kBFloat16 ? launch_from<__nv_bfloat16>(params, stream)
                                            : launch_from<__half>(params, stream);
  }
  switch (std::min(source_width(params), cache_width(params))) {
    case 16: return launch_row<CopyRow<16>>(params, stream);
    case 8: return launch_row<CopyRow<8>>(params, stream);
    case 4: return launch_row<CopyRow<4>>(params, stream);
    default: return launch_row<CopyRow<2>>(params, stream);
  }
}

}  // namespace pagedkern
