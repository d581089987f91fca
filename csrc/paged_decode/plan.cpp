// The schedule of a call, from lengths on the host, for tests and benches.
#include "common/split_plan.h"
#include "paged_decode/config.h"
#include "paged_decode/instances.h"
#include "paged_decode/launcher.h"

namespace pagedkern {
namespace {

template <class Config>
DecodePlan plan_of(const SplitParams& params, int64_t multiprocessors) {
  const SplitPlan split =
      split_plan<Config>(params, multiprocessors * Config::kBlocksPerMultiprocessor,
                         [](const Part& part) -> int64_t { return part.tile_end - part.tile_begin; });
  DecodePlan plan;
  plan.bucket_tiles = split.bucket_tiles;
  plan.partial_bytes = 2 * split.parts * params.group * (params.op.cache.head_dim + 2) * 4;
  plan.tile_keys = Config::kTileKeys;
  plan.blocks_per_multiprocessor = Config::kBlocksPerMultiprocessor;
  plan.bytes_in_flight =
      int64_t{Config::kBlocksPerMultiprocessor} * (Config::kSlots - 1) * Config::kWarps * Config::kSlotBytes;
  return plan;
}

}  // namespace

DecodePlan paged_decode_plan(const std::vector<int32_t>& seq_lens, int64_t num_heads, int64_t num_kv_heads,
                             int64_t head_dim, DType cache, int64_t multiprocessors) {
  SplitParams params = {};
  params.op.cache.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  params.op.cache.head_dim = static_cast<int32_t>(head_dim);
  params.op.causal = true;
  params.op.window_left = params.op.window_right = -1;
  params.op.seq_lens = seq_lens.data();
  params.op.num_seqs = static_cast<int64_t>(seq_lens.size());
  params.op.first_query_len = params.op.last_query_len = 1;
  params.window = key_window(params.op);
  params.group = static_cast<int32_t>(num_heads / num_kv_heads);
  params.least_keys = static_cast<int32_t>(least_part_keys(params.group, cache));
  params.max_buckets = kMaxDecodeBlocks;
  return with_instance(cache, padded_head_dim(static_cast<int>(head_dim), false), [&]<DType kCache, int kDim>() {
    return params.group <= 8 ? plan_of<PagedDecodeConfig<kCache, kDim, 8, false>>(params, multiprocessors)
                             : plan_of<PagedDecodeConfig<kCache, kDim, 16, false>>(params, multiprocessors);
  });
}

}  // namespace pagedkern
