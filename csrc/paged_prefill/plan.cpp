// The schedule of a call, from lengths on the host, for tests and benches.
#include "common/split_plan.h"
#include "paged_prefill/bounds.h"
#include "paged_prefill/launcher.h"

namespace pagedkern {
namespace {

// Tiles of a part that some row of its query tile sees.
template <class Config>
int64_t seen_tiles(const PagedPrefillParams& p, const Part& part) {
  const int64_t rows = static_cast<int64_t>(part.query_len) * p.group;
  const int64_t first = (ceil_div<int64_t>(rows, p.tile_rows) - 1 - part.row_tile) * p.tile_rows;
  const int64_t last = std::min<int64_t>(first + p.tile_rows, rows) - 1;
  const int64_t before = part.seq_len - part.query_len;
  const KeyRange low = visible_keys(before + first / p.group, p.window, part.seq_len);
  const KeyRange high = visible_keys(before + last / p.group, p.window, part.seq_len);
  const int64_t begin = std::max(low.begin / Config::kTileKeys, part.tile_begin);
  const int64_t end = std::min(ceil_div(high.end, Config::kTileKeys), part.tile_end);
  return std::max<int64_t>(end - begin, 0);
}

template <int kDim, bool kFp8>
PrefillPlan plan_of(const PagedPrefillParams& params, int64_t slot_floats, int64_t multiprocessors) {
  using Config = PagedPrefillConfig<kDim, kFp8>;
  const SplitPlan split = split_plan<Config>(params, prefill_grid<kDim, kFp8>(params, multiprocessors),
                                             [&](const Part& part) { return seen_tiles<Config>(params, part); });
  return {split.bucket_tiles, 2 * split.parts * slot_floats * 4, Config::kTileKeys};
}

template <bool kFp8>
PrefillPlan plan_of_dim(const PagedPrefillParams& params, int64_t slot_floats, int64_t multiprocessors) {
  switch (prefill_dim(params.op.cache.head_dim)) {
    case 64: return plan_of<64, kFp8>(params, slot_floats, multiprocessors);
    case 96: return plan_of<96, kFp8>(params, slot_floats, multiprocessors);
    case 128: return plan_of<128, kFp8>(params, slot_floats, multiprocessors);
    case 192: return plan_of<192, kFp8>(params, slot_floats, multiprocessors);
    default: return plan_of<256, kFp8>(params, slot_floats, multiprocessors);
  }
}

}  // namespace

PrefillPlan paged_prefill_plan(const std::vector<int32_t>& cu_seqlens_q, const std::vector<int32_t>& seq_lens,
                               int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, DType cache,
                               int64_t multiprocessors) {
  PagedPrefillParams params = {};
  PagedAttentionParams& op = params.op;
  op.cache.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  op.cache.head_dim = static_cast<int32_t>(head_dim);
  op.cache.dtype = cache;
  op.causal = true;
  op.window_left = op.window_right = -1;
  op.seq_lens = seq_lens.data();
  op.cu_seqlens_q = cu_seqlens_q.data();
  op.num_seqs = static_cast<int64_t>(seq_lens.size());
  op.num_tokens = cu_seqlens_q.back();
  op.max_seqlen_k = *std::max_element(seq_lens.begin(), seq_lens.end());
  op.first_query_len = 1;
  op.last_query_len = op.max_seqlen_q = op.num_tokens;
  params.window = key_window(op);
  params.group = static_cast<int32_t>(num_heads / num_kv_heads);
  const PrefillBounds bounds = prefill_bounds(op.num_tokens, num_heads, num_kv_heads, head_dim, op.num_seqs,
                                              op.max_seqlen_q, op.max_seqlen_k, 0, op.first_query_len);
  op.workspace_bytes = split_workspace(bounds.split).bytes;
  (void)place_prefill_bounds(bounds, params);
  return is_fp8(cache) ? plan_of_dim<true>(params, bounds.split.slot_floats, multiprocessors)
                       : plan_of_dim<false>(params, bounds.split.slot_floats, multiprocessors);
}

}  // namespace pagedkern
