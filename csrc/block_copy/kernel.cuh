// copy_blocks: every pair of every layer in one launch.
#pragma once

#include "block_copy/config.h"
#include "block_copy/params.h"
#include "common/fast_divide.h"
#include "common/vectors.cuh"

namespace pagedkern {

// What the kernel gets by value. A block of a cache is num_tokens x num_heads rows, where neighbouring rows that are
// contiguous in every cache have been merged by the launcher; its vectors are numbered row by row. A piece of it, what
// a block of threads moves at a time, is kThreads * kUnroll vectors. Works are pieces: those of a cache's block, of key
// and value of every layer, of every pair.
template <int kLayers>
struct CopyBlocksKernelParams {
  CopyBlocksLayer layers[kLayers];                          // strides in bytes
  int64_t inline_pairs[2 * BlockCopyConfig::kInlinePairs];  // the mapping, where block_mapping is null
  const int64_t* block_mapping;                             // [pairs, 2] (source, destination) or null
  int64_t mapping_stride_pair;                              // elements
  int64_t mapping_stride_side;                              // elements
  int64_t num_blocks;                                       // ids beyond it are skipped
  uint32_t num_works;
  uint32_t num_vectors;        // of a block
  uint32_t rounds;             // of kThreads * kUnroll vectors in a piece
  FastDivide pieces_of_block;  // work to (pair and cache)
  FastDivide caches;           // pair and cache to pair; caches are 2 * num_layers
  FastDivide vectors_of_row;
  FastDivide heads;  // row to token
};

struct BlockPair {
  int64_t source, destination;
};

// Lanes 0 and 1 read for their warp, at once: both ids are in one sector as a rule.
template <int kLayers>
static __device__ __forceinline__ BlockPair load_pair(const CopyBlocksKernelParams<kLayers>& p, uint32_t pair) {
  if (p.block_mapping == nullptr) return {p.inline_pairs[2 * pair], p.inline_pairs[2 * pair + 1]};
  const int64_t* entry = p.block_mapping + pair * p.mapping_stride_pair;
  if (threadIdx.x % 32 == 1) entry += p.mapping_stride_side;
  int64_t id = 0;
  if (threadIdx.x % 32 < 2) id = *entry;
  return {__shfl_sync(0xFFFFFFFFu, id, 0), __shfl_sync(0xFFFFFFFFu, id, 1)};
}

// grid [min(works, kMaxBlocks)]
template <int kBytes, int kLayers>
__global__ void __launch_bounds__(BlockCopyConfig::kThreads, BlockCopyConfig::kBlocksPerSm)
    copy_blocks_kernel(const __grid_constant__ CopyBlocksKernelParams<kLayers> p) {
  using Vector = typename Access<kBytes>::Type;
  constexpr uint32_t kThreads = BlockCopyConfig::kThreads;
  constexpr uint32_t kUnroll = BlockCopyConfig::kUnroll;

  for (uint32_t work = blockIdx.x; work < p.num_works; work += gridDim.x) {
    const uint32_t block = p.pieces_of_block(work);
    const uint32_t pair = p.caches(block);
    const uint32_t which = block - pair * p.caches.divisor;
    const CopyBlocksLayer& layer = p.layers[which / 2];
    const PagedCache& cache = which % 2 == 0 ? layer.key_cache : layer.value_cache;
    const BlockPair ids = load_pair(p, pair);
    if (ids.source < 0 || ids.source >= p.num_blocks || ids.destination < 0 || ids.destination >= p.num_blocks) {
      continue;
    }
    const char* from = static_cast<const char*>(cache.data) + ids.source * cache.stride_block;
    char* to = static_cast<char*>(cache.data) + ids.destination * cache.stride_block;
    const uint32_t piece = work - block * p.pieces_of_block.divisor;
    for (uint32_t round = 0; round < p.rounds; ++round) {
      const uint32_t first = (piece * p.rounds + round) * kThreads * kUnroll + threadIdx.x;
      Vector values[kUnroll];
      int64_t offsets[kUnroll];
#pragma unroll
      for (uint32_t u = 0; u < kUnroll; ++u) {
        const uint32_t i = first + u * kThreads;
        if (i >= p.num_vectors) break;
        const uint32_t row = p.vectors_of_row(i);
        const uint32_t token = p.heads(row);
        offsets[u] = cache.offset(0, token, row - token * p.heads.divisor) +
                     static_cast<int64_t>(i - row * p.vectors_of_row.divisor) * kBytes;
        values[u] = *reinterpret_cast<const Vector*>(from + offsets[u]);
      }
#pragma unroll
      for (uint32_t u = 0; u < kUnroll; ++u) {
        if (first + u * kThreads < p.num_vectors) *reinterpret_cast<Vector*>(to + offsets[u]) = values[u];
      }
    }
  }
}

}  // namespace pagedkern
