#include <algorithm>

#include "common/cache_rows.h"
#include "common/launch.h"
#include "common/vectors.cuh"
#include "gather/kernel.cuh"
#include "gather/launcher.h"

namespace pagedkern {
namespace {

template <class Row>
Status launch_chunks(GatherKernelParams p, void* stream) {
  p.chunks_of_row = FastDivide(static_cast<uint32_t>(p.cache.head_dim / Row::kElements));
  p.heads = FastDivide(static_cast<uint32_t>(p.cache.num_kv_heads));
  p.trade = p.chunks_of_row.divisor % 2 == 0;
  const int64_t chunks_of_token = static_cast<int64_t>(p.cache.num_kv_heads) * p.chunks_of_row.divisor;
  // A block's work is numbered in 31 bits.
  const int64_t most = std::clamp<int64_t>((1 << 30) / chunks_of_token, 1, GatherConfig::kMaxTokens);
  p.block_tokens = static_cast<int32_t>(std::clamp<int64_t>(p.total / GatherConfig::kMaxBlocks, 1, most));
  LaunchConfig config;
  const int64_t blocks = (p.total + p.block_tokens - 1) / p.block_tokens;
  config.grid = dim3(static_cast<unsigned>(std::min<int64_t>(blocks, GatherConfig::kMaxBlocks)));
  config.block = dim3(GatherConfig::kThreads);
  return launch(gather_cache_kernel<Row>, config, p, static_cast<cudaStream_t>(stream));
}

// The widest accesses that rows of key and value, and of the caches, allow.
int rows_width(const GatherCacheParams& p) {
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

Status launch_copy(const GatherKernelParams& p, void* stream) {
  switch (std::min(rows_width(p), cache_width(p))) {
    case 16: return launch_chunks<CopyChunk<8>>(p, stream);
    case 8: return launch_chunks<CopyChunk<4>>(p, stream);
    case 4: return launch_chunks<CopyChunk<2>>(p, stream);
    default: return launch_chunks<CopyChunk<1>>(p, stream);
  }
}

template <class T, class Format>
Status launch_dequantize(const GatherKernelParams& p, void* stream) {
  const int rows = rows_width(p), cache = cache_width(p);
  if (rows == 16 && cache == 16) return launch_chunks<DequantizeChunk<T, Format, 16>>(p, stream);
  if (rows == 16 && cache >= 8) return launch_chunks<DequantizeChunk<T, Format, 8>>(p, stream);
  return launch_chunks<DequantizeChunk<T, Format, 1>>(p, stream);
}

template <class T>
Status launch_to(const GatherKernelParams& p, void* stream) {
  return p.cache.dtype == DType::kFloat8E4M3 ? launch_dequantize<T, E4M3>(p, stream)
                                             : launch_dequantize<T, E5M2>(p, stream);
}

}  // namespace

Status launch_gather_cache(const GatherCacheParams& params, void* stream) {
  if (params.total == 0 || params.num_seqs == 0) return {};
  GatherKernelParams p = {};
  static_cast<GatherCacheParams&>(p) = params;
  merge_heads(p);
  if (!is_fp8(p.cache.dtype)) return launch_copy(p, stream);
  return p.dtype == DType::kBFloat16 ? launch_to<__nv_bfloat16>(p, stream) : launch_to<__half>(p, stream);
}

}  // namespace pagedkern
