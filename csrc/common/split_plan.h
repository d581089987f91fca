// The schedule of a call, from lengths on the host, for tests and benches: a kernel makes its own on the device, by the
// same functions.
#pragma once

#include <algorithm>
#include <vector>

#include "common/split_schedule.h"

namespace pagedkern {

struct SplitPlan {
  std::vector<int64_t> bucket_tiles;  // tiles of keys that each busy block computes
  int64_t parts = 0;                  // with a partial result
};

// `params`: with lengths and starts in host memory. `seen(part)`: how many tiles of a part have work.
template <class Config, class Seen>
SplitPlan split_plan(const SplitParams& params, int64_t blocks, Seen seen) {
  WorkSum all = {};
  for (int64_t seq = 0; seq < params.op.num_seqs; ++seq) all.add<Config>(params, seq);
  const Cut cut = cut_of<Config>(params, all, blocks);
  SplitPlan plan;
  if (cut.buckets == 0) return plan;
  PartWalk walk = {};
  walk.whole_units = cut.whole_units;
  walk.work = sequence_work<Config>(params, 0, cut.whole_units);
  for (int64_t bucket = 0; bucket < cut.buckets; ++bucket) {
    walk.left = bucket_begin(bucket + 1, cut.pieces, cut.buckets) - bucket_begin(bucket, cut.pieces, cut.buckets);
    plan.bucket_tiles.push_back(0);
    Part part;
    for (next_part<Config>(params, walk, part); part.tile_begin < part.tile_end;
         next_part<Config>(params, walk, part)) {
      plan.bucket_tiles.back() += seen(part);
      plan.parts += part.num_pieces < part.unit_pieces;
    }
  }
  return plan;
}

}  // namespace pagedkern
