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

// Rows of heads that lie end to end in every cache become one row of a token, then rows of tokens one row of a block.
template <int kLayers>
void merge_rows(CopyBlocksKernelParams<kLayers>& p) {
  const auto all = [&p](auto&& contiguous) {
    return std::all_of(p.layers, p.layers + p.num_layers, [&](const CopyBlocksLayer& layer) {
      return contiguous(layer.key_cache) && contiguous(layer.value_cache);
    });
  };
  if (all([&p](const PagedCache& c) { return p.num_heads == 1 || c.stride_head == p.row_bytes; })) {
    p.row_bytes *= p.num_heads;
    p.num_heads = 1;
    if (all([&p](const PagedCache& c) { return p.num_tokens == 1 || c.stride_token == p.row_bytes; })) {
      p.row_bytes *= p.num_tokens;
      p.num_tokens = 1;
    }
  }
}

template <int kLayers>
int access_width(const CopyBlocksKernelParams<kLayers>& p) {
  AccessWidth width;
  width.bytes(p.row_bytes);
  for (int i = 0; i < p.num_layers; ++i) {
    for (const PagedCache* cache : {&p.layers[i].key_cache, &p.layers[i].value_cache}) {
      width.pointer(cache->data).bytes(cache->stride_block).bytes(cache->stride_token).bytes(cache->stride_head);
    }
  }
  return width.width();
}

template <int kBytes, int kLayers>
Status launch_width(const CopyBlocksKernelParams<kLayers>& p, void* stream) {
  LaunchConfig config;
  const int64_t work = p.num_pairs * 2 * p.num_layers;
  config.grid = dim3(static_cast<unsigned>(std::min<int64_t>(work, BlockCopyConfig::kMaxBlocks)));
  config.block = dim3(BlockCopyConfig::kThreads);
  return launch(copy_blocks_kernel<kBytes, kLayers>, config, p, static_cast<cudaStream_t>(stream));
}

template <int kLayers>
Status launch_pairs(const CopyBlocksKernelParams<kLayers>& p, void* stream) {
  switch (access_width(p)) {
    case 16: return launch_width<16>(p, stream);
    case 8: return launch_width<8>(p, stream);
    case 4: return launch_width<4>(p, stream);
    case 2: return launch_width<2>(p, stream);
    default: return launch_width<1>(p, stream);
  }
}

// A host mapping goes into the parameters, kInlinePairs at a launch: no copy of it that something must wait for.
template <int kLayers>
Status launch_inline(const CopyBlocksParams& params, CopyBlocksKernelParams<kLayers>& p, void* stream) {
  p.mapping_stride_pair = 2;
  p.mapping_stride_side = 1;
  for (int64_t first = 0; first < params.num_pairs; first += BlockCopyConfig::kInlinePairs) {
    p.num_pairs = std::min<int64_t>(params.num_pairs - first, BlockCopyConfig::kInlinePairs);
    for (int64_t i = 0; i < p.num_pairs; ++i) {
      const int64_t* pair = params.block_mapping + (first + i) * params.mapping_stride_pair;
      p.inline_pairs[2 * i] = pair[0];
      p.inline_pairs[2 * i + 1] = pair[params.mapping_stride_side];
    }
    const Status status = launch_pairs(p, stream);
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
  p.num_tokens = params.block_size;
  p.num_heads = params.num_kv_heads;
  p.num_layers = count;
  p.row_bytes = static_cast<int64_t>(params.head_dim) * params.itemsize;
  merge_rows(p);
  if (params.mapping_on_host) return launch_inline(params, p, stream);
  p.block_mapping = params.block_mapping;
  p.mapping_stride_pair = params.mapping_stride_pair;
  p.mapping_stride_side = params.mapping_stride_side;
  p.num_pairs = params.num_pairs;
  return launch_pairs(p, stream);
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
