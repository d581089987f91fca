// The workspace of a kernel that splits over keys: counters of arrivals, then slots of partial results.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/split_schedule.h"

namespace pagedkern {

// What bounds it; num_splits 0: chosen on the device.
struct SplitBounds {
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t max_seqlen_k;
  int64_t num_splits;
  int64_t first_query_len;  // of the sequences that the kernel takes
  int64_t tile_keys;        // the fewest of an instance
  int64_t place_units;      // of a sequence that num_splits splits, at most
  int64_t max_buckets;
  int64_t slot_floats;
  int64_t unit_blocks = 1;  // that compute a unit together, and have a counter each
};

struct SplitWorkspace {
  int64_t place_tokens;
  int64_t max_splits;
  int64_t counter_bytes;
  int64_t bytes;
};

inline SplitWorkspace split_workspace(const SplitBounds& b) {
  constexpr int64_t kAlignment = 64;
  SplitWorkspace w;
  const int64_t by_tokens = b.num_tokens / b.first_query_len;
  w.place_tokens = by_tokens < b.num_seqs ? b.first_query_len : 0;
  w.max_splits = std::max<int64_t>(1, std::min(b.num_splits, ceil_div(b.max_seqlen_k, b.tile_keys)));
  int64_t counters = b.max_buckets, slots = 2 * b.max_buckets;
  if (b.num_splits > 0) {
    counters = std::min(by_tokens, b.num_seqs) * b.place_units;
    slots = counters * w.max_splits;
    if (w.max_splits == 1) counters = slots = 0;  // nothing is ever merged
  }
  w.counter_bytes = ceil_div<int64_t>(counters * b.unit_blocks * 8, kAlignment) * kAlignment;
  w.bytes = w.counter_bytes + slots * b.slot_floats * 4;
  return w;
}

// Into what a kernel gets; false: params.op.workspace is too small.
inline bool place_split_workspace(const SplitBounds& b, SplitParams& params) {
  const SplitWorkspace w = split_workspace(b);
  params.max_buckets = static_cast<int32_t>(b.max_buckets);
  params.place_tokens = static_cast<int32_t>(w.place_tokens);
  params.place_units = static_cast<int32_t>(b.place_units);
  params.max_splits = static_cast<int32_t>(w.max_splits);
  params.counters = static_cast<uint64_t*>(params.op.workspace);
  params.partials = reinterpret_cast<float*>(static_cast<char*>(params.op.workspace) + w.counter_bytes);
  return w.bytes <= params.op.workspace_bytes;
}

}  // namespace pagedkern
