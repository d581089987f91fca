#include <algorithm>

#include "block_copy/kernel.cuh"
#include "block_copy/launcher.h"
#include "common/launch.h"

namespace pagedkern {
namespace {

void strides_to_bytes(PagedCache& cache, int64_t itemsize) {
  cache.stride_block *= itemsize;
  cache.stride_token *= itemsize;
  cache.stride_head *= itemsize;
}

// A block of a cache as the launchers see it, in bytes.
struct BlockRows {
  int64_t num_tokens;
  int64_t num_heads;
  int64_t row_bytes;
};

// Rows of heads that lie end to end in every cache become one row of a token, then rows of tokens one row of a block.
void merge_rows(const CopyBlocksLayer* layers, int count, BlockRows& rows) {
  const auto all = [&](auto&& contiguous) {
    return std::all_of(layers, layers + count, [&](const CopyBlocksLayer& layer) {
      return contiguous(layer.key_cache) && contiguous(layer.value_cache);
    });
  };
  if (all([&](const PagedCache& c) { return rows.num_heads == 1 || c.stride_head == rows.row_bytes; })) {
    rows.row_bytes *= rows.num_heads;
    rows.num_heads = 1;
    if (all([&](const PagedCache& c) { return rows.num_tokens == 1 || c.stride_token == rows.row_bytes; })) {
      rows.row_bytes *= rows.num_tokens;
      rows.num_tokens = 1;
    }
  }
}

int access_width(const CopyBlocksLayer* layers, int count, const BlockRows& rows) {
  AccessWidth width;
  width.bytes(rows.row_bytes);
  for (int i = 0; i < count; ++i) {
    for (const PagedCache* cache : {&layers[i].key_cache, &layers[i].value_cache}) {
      width.pointer(cache->data).bytes(cache->stride_block).bytes(cache->stride_token).bytes(cache->stride_head);
    }
  }
  return width.width();
}

template <int kBytes, int kLayers>
Status launch_works(const CopyBlocksKernelParams<kLayers>& p, void* stream) {
  LaunchConfig config;
  config.grid = dim3(std::min<uint32_t>(p.num_works, BlockCopyConfig::kMaxBlocks));
  config.block = dim3(BlockCopyConfig::kThreads);
  return launch(copy_blocks_kernel<kBytes, kLayers>, config, p, static_cast<cudaStream_t>(stream));
}

// As many pairs at a launch as numbers of works in 31 bits allow: all of them, but for absurd sizes. A host mapping
// goes into the parameters, kInlinePairs at a launch: no copy of it that something must wait for.
template <int kBytes, int kLayers>
Status launch_pairs(const CopyBlocksParams& params, CopyBlocksKernelParams<kLayers>& p, const BlockRows& rows,
                    void* stream) {
  constexpr int64_t kPiece = BlockCopyConfig::kThreads * BlockCopyConfig::kUnroll;
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t vectors = rows.num_tokens * rows.num_heads * (rows.row_bytes / kBytes);
  if (vectors > kMost) return {"a block of the cache has more than 2^30 accesses"};
  p.num_vectors = static_cast<uint32_t>(vectors);
  p.vectors_of_row = FastDivide(static_cast<uint32_t>(rows.row_bytes / kBytes));
  p.heads = FastDivide(static_cast<uint32_t>(rows.num_heads));
  // Large pieces where there is work for all all the same.
  const int64_t rounds = (vectors + kPiece - 1) / kPiece;
  const int64_t spare = rounds * p.caches.divisor * params.num_pairs / BlockCopyConfig::kMaxBlocks;
  p.rounds = static_cast<uint32_t>(std::clamp<int64_t>(spare, 1, std::min(rounds, BlockCopyConfig::kMaxRounds)));
  p.pieces_of_block = FastDivide(static_cast<uint32_t>((rounds + p.rounds - 1) / p.rounds));
  const int64_t works_of_pair = static_cast<int64_t>(p.pieces_of_block.divisor) * p.caches.divisor;
  const int64_t fitting = std::max<int64_t>(kMost / works_of_pair, 1);
  const int64_t most = params.mapping_on_host ? std::min<int64_t>(fitting, BlockCopyConfig::kInlinePairs) : fitting;
  for (int64_t first = 0; first < params.num_pairs; first += most) {
    const int64_t count = std::min(params.num_pairs - first, most);
    const int64_t* mapping = params.block_mapping + first * params.mapping_stride_pair;
    p.num_works = static_cast<uint32_t>(count * works_of_pair);
    for (int64_t i = 0; params.mapping_on_host && i < count; ++i) {
      p.inline_pairs[2 * i] = mapping[i * params.mapping_stride_pair];
      p.inline_pairs[2 * i + 1] = mapping[i * params.mapping_stride_pair + params.mapping_stride_side];
    }
    p.block_mapping = params.mapping_on_host ? nullptr : mapping;
    const Status status = launch_works<kBytes>(p, stream);
    if (!status.ok()) return status;
  }
  return {};
}

template <int kLayers>
Status launch_layers(const CopyBlocksParams& params, int first, int count, void* stream) {
  CopyBlocksKernelParams<kLayers> p = {};
  std::copy_n(params.layers + first, count, p.layers);
  for (int i = 0; i < count; ++i) {
    strides_to_bytes(p.layers[i].key_cache, params.itemsize);
    strides_to_bytes(p.layers[i].value_cache, params.itemsize);
  }
  p.num_blocks = params.num_blocks;
  p.caches = FastDivide(static_cast<uint32_t>(2 * count));
  p.mapping_stride_pair = params.mapping_stride_pair;
  p.mapping_stride_side = params.mapping_stride_side;
  BlockRows rows = {params.block_size, params.num_kv_heads, static_cast<int64_t>(params.head_dim) * params.itemsize};
  merge_rows(p.layers, count, rows);
  switch (access_width(p.layers, count, rows)) {
    case 16: return launch_pairs<16>(params, p, rows, stream);
    case 8: return launch_pairs<8>(params, p, rows, stream);
    case 4: return launch_pairs<4>(params, p, rows, stream);
    case 2: return launch_pairs<2>(params, p, rows, stream);
    default: return launch_pairs<1>(params, p, rows, stream);
  }
}

}  // namespace

Status launch_copy_blocks(const CopyBlocksParams& params, void* stream) {
  if (params.num_pairs == 0) return {};
  for (int first = 0; first < params.num_layers; first += BlockCopyConfig::kMaxLayers) {
    const int count = std::min(params.num_layers - first, BlockCopyConfig::kMaxLayers);
    const Status status = count <= BlockCopyConfig::kFewLayers
                              ? launch_layers<BlockCopyConfig::kFewLayers>(params, first, count, stream)
                              : launch_layers<BlockCopyConfig::kMaxLayers>(params, first, count, stream);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace pagedkern
