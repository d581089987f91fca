// What bounds a call of the prefill kernel, from numbers the host knows: its grid and its workspace.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/split_workspace.h"
#include "paged_prefill/config.h"
#include "paged_prefill/params.h"

namespace pagedkern {

// The kDim for a head_dim.
inline int64_t prefill_dim(int64_t head_dim) {
  for (const int64_t dim : {64, 96, 128, 192}) {
    if (head_dim <= dim) return dim;
  }
  return 256;
}

// Units in work at a time. A cluster lies within one group of multiprocessors, whose rest holds none: one bucket more
// than fit would take as long again as all the others.
inline int64_t prefill_resident_units(int64_t dim, bool fp8, int64_t group, int64_t multiprocessors) {
  const int64_t blocks = prefill_resident_threads(dim, fp8) / (prefill_block_rows(group) * kPrefillThreadsOfRow);
  const int log = prefill_cluster_log(group);
  const int64_t groups = multiprocessors / kMultiprocessorsOfGroup, rest = multiprocessors % kMultiprocessorsOfGroup;
  return std::max<int64_t>(1, groups * (kMultiprocessorsOfGroup * blocks >> log) + (rest * blocks >> log));
}

struct PrefillBounds {
  int64_t num_units;
  int64_t slot_threads;
  SplitBounds split;
};

inline PrefillBounds prefill_bounds(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                    int64_t num_seqs, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t num_splits,
                                    int64_t first_query_len) {
  constexpr int64_t kLeastTileKeys = PagedPrefillConfig<256, false>::kTileKeys;
  const int64_t group = num_heads / num_kv_heads, dim = prefill_dim(head_dim), rows = prefill_rows(group);
  const int64_t longest = std::max<int64_t>(max_seqlen_q, 1);
  const int64_t longest_split = num_splits > 0 ? std::min<int64_t>(longest, kMaxSplitQueryLen) : longest;
  PrefillBounds b;
  b.num_units = (num_tokens * group / rows + std::min(num_seqs, num_tokens / first_query_len)) * num_kv_heads;
  b.slot_threads =
      32 * ceil_div<int64_t>(std::min(group * longest_split, rows), PagedPrefillConfig<64, false>::kWarpRows);
  const int64_t tiles = std::max<int64_t>(1, ceil_div(max_seqlen_k, kLeastTileKeys));
  b.split = {
      .num_tokens = num_tokens,
      .num_seqs = num_seqs,
      .max_seqlen_k = max_seqlen_k,
      .num_splits = num_splits,
      .first_query_len = first_query_len,
      .tile_keys = kLeastTileKeys,
      .place_units = first_query_len > kMaxSplitQueryLen ? 0 : num_kv_heads * ceil_div(group * longest_split, rows),
      .max_buckets = std::min(prefill_resident_units(dim, false, group, kMaxMultiprocessors), b.num_units * tiles),
      .slot_floats = b.slot_threads * prefill_slot_vectors(dim) * 4,
      .unit_blocks = int64_t{1} << prefill_cluster_log(group)};
  return b;
}

// The splitting rules of a call whose bounds are known; false: its workspace is too small.
inline bool place_prefill_bounds(const PrefillBounds& bounds, PagedPrefillParams& params) {
  params.num_units = bounds.num_units;
  params.tile_rows = prefill_rows(params.group);
  params.slot_threads = static_cast<int32_t>(bounds.slot_threads);
  params.block_rows = prefill_block_rows(params.group);
  params.cluster_log = prefill_cluster_log(params.group);
  params.least_keys = kPrefillLeastKeys;
  return place_split_workspace(bounds.split, params);
}

// Blocks, or clusters of them, for every unit, or as many as the device holds at once where units may be split and are
// fewer.
template <int kDim, bool kFp8>
int64_t prefill_grid(const PagedPrefillParams& p, int64_t multiprocessors) {
  const int64_t tiles =
      std::max<int64_t>(1, ceil_div<int64_t>(p.op.max_seqlen_k, PagedPrefillConfig<kDim, kFp8>::kTileKeys));
  const int64_t pieces = p.op.num_splits > 0 ? std::min<int64_t>(tiles, p.op.num_splits) : tiles;
  const int64_t resident = prefill_resident_units(kDim, kFp8, p.group, multiprocessors);
  return std::max(p.num_units, std::min(resident, p.num_units * pieces));
}

}  // namespace pagedkern
