// copy_blocks: every pair of every layer in one launch.
#pragma once

#include "block_copy/config.h"
#include "block_copy/params.h"
#include "common/vectors.cuh"

namespace pagedkern {

// What the kernel gets by value. A block of a cache is num_tokens x num_heads rows of row_bytes, where neighbouring
// rows that are contiguous in every cache have been merged by the launcher.
template <int kLayers>
struct CopyBlocksKernelParams {
  CopyBlocksLayer layers[kLayers];                          // strides in bytes
  int64_t inline_pairs[2 * BlockCopyConfig::kInlinePairs];  // the mapping, where block_mapping is null
  const int64_t* block_mapping;                             // [num_pairs, 2] (source, destination) or null
  int64_t mapping_stride_pair;                              // elements
  int64_t mapping_stride_side;                              // elements
  int64_t num_pairs;
  int64_t num_blocks;  // ids beyond it are skipped
  int64_t num_tokens;
  int32_t num_heads;
  int32_t num_layers;
  int64_t row_bytes;
};

// grid [min(work, kMaxBlocks)]: a block of threads takes one (layer, key or value, pair) after the other.
template <int kBytes, int kLayers>
__global__ void __launch_bounds__(BlockCopyConfig::kThreads)
    copy_blocks_kernel(const __grid_constant__ CopyBlocksKernelParams<kLayers> p) {
  using Vector = typename Access<kBytes>::Type;
  constexpr int kThreads = BlockCopyConfig::kThreads;
  constexpr int kUnroll = BlockCopyConfig::kUnroll;
  const int64_t per_row = p.row_bytes / kBytes;
  const int64_t total = p.num_tokens * p.num_heads * per_row;
  const int64_t num_caches = 2 * static_cast<int64_t>(p.num_layers);

  for (int64_t work = blockIdx.x; work < num_caches * p.num_pairs; work += gridDim.x) {
    const int64_t pair = work / num_caches;
    const int which = static_cast<int>(work - pair * num_caches);
    const CopyBlocksLayer& layer = p.layers[which / 2];
    const PagedCache& cache = which % 2 == 0 ? layer.key_cache : layer.value_cache;
    const int64_t* mapping = p.block_mapping == nullptr ? p.inline_pairs : p.block_mapping;
    const int64_t source = mapping[pair * p.mapping_stride_pair];
    const int64_t destination = mapping[pair * p.mapping_stride_pair + p.mapping_stride_side];
    if (source < 0 || source >= p.num_blocks || destination < 0 || destination >= p.num_blocks) continue;
    const char* from = static_cast<const char*>(cache.data) + source * cache.stride_block;
    char* to = static_cast<char*>(cache.data) + destination * cache.stride_block;

    for (int64_t first = threadIdx.x; first < total; first += kThreads * kUnroll) {
      Vector values[kUnroll];
      int64_t offsets[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t i = first + u * kThreads;
        if (i >= total) break;
        const int64_t row = i / per_row;
        const int64_t token = row / p.num_heads;
        offsets[u] = cache.offset(0, token, row - token * p.num_heads) + (i - row * per_row) * kBytes;
        values[u] = *reinterpret_cast<const Vector*>(from + offsets[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads < total) *reinterpret_cast<Vector*>(to + offsets[u]) = values[u];
      }
    }
  }
}

}  // namespace pagedkern
