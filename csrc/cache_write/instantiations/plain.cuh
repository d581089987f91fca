// Launches of reshape_and_cache, one template argument away from a kernel.
#pragma once

#include "cache_write/kernel.cuh"
#include "cache_write/launcher.cuh"
#include "cache_write/launcher.h"

namespace pagedkern {

template <class Row>
Status launch_plain(CacheWriteKernelParams p, void* stream) {
  p.chunks_of_row = FastDivide(static_cast<uint32_t>(p.cache.head_dim / Row::kElements));
  p.heads = FastDivide(static_cast<uint32_t>(p.cache.num_kv_heads));
  const int64_t chunks = static_cast<int64_t>(p.cache.num_kv_heads) * p.chunks_of_row.divisor;
  const LaunchConfig config = team_grid(p, chunks);
  return launch(reshape_and_cache_kernel<Row>, config, p, static_cast<cudaStream_t>(stream));
}

template <class T, class Format>
Status launch_quantize_format(const CacheWriteKernelParams& p, void* stream) {
  const int source = source_width(p), cache = cache_width(p);
  if (source == 16 && cache == 16) return launch_plain<QuantizeRow<T, Format, 8, true>>(p, stream);
  if (source == 16 && cache >= 8) return launch_plain<QuantizeRow<T, Format, 8, false>>(p, stream);
  return launch_plain<QuantizeRow<T, Format, 1, false>>(p, stream);
}

template <class T>
Status launch_quantize(const CacheWriteKernelParams& p, void* stream) {
  return p.cache.dtype == DType::kFloat8E4M3 ? launch_quantize_format<T, E4M3>(p, stream)
                                             : launch_quantize_format<T, E5M2>(p, stream);
}

Status launch_quantize_bfloat16(const CacheWriteKernelParams& params, void* stream);
Status launch_quantize_float16(const CacheWriteKernelParams& params, void* stream);

}  // namespace pagedkern
