// The schedule as a block sees it: its bucket, and the parts of units in it one after another.
#pragma once

#include "common/split_schedule.h"

namespace pagedkern {

// Every block adds up the work of all sequences and finds where its bucket, of `blocks` at most, begins: shared.walk
// stands there, and shared.parts has the first parts. 0 buckets: nothing to do at all. `threads`: of the block,
// Config::kMaxThreads at most.
template <class Config, class Shared>
static __device__ __forceinline__ Cut find_bucket(const SplitParams& p, uint32_t bucket, uint32_t blocks, int threads,
                                                  Shared& shared) {
  const int64_t share = ceil_div<int64_t>(p.op.num_seqs, threads);
  const int64_t first = threadIdx.x * share;
  const int64_t last = min(first + share, p.op.num_seqs);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  WorkSum mine = {};
  for (int64_t seq = first; seq < last; ++seq) mine.template add<Config>(p, seq);
  int64_t pieces = mine.pieces, units = mine.units;  // of this thread and those below it in the warp
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other_pieces = __shfl_up_sync(0xFFFFFFFFu, pieces, step);
    const int64_t other_units = __shfl_up_sync(0xFFFFFFFFu, units, step);
    if (lane >= step) {
      pieces += other_pieces;
      units += other_units;
    }
    if constexpr (Config::kManyRowTiles) {
      mine.keys += __shfl_xor_sync(0xFFFFFFFFu, mine.keys, step);
      mine.seen += __shfl_xor_sync(0xFFFFFFFFu, mine.seen, step);
    }
  }
  if (lane == 31) {
    shared.scan[0][warp] = pieces;
    shared.scan[1][warp] = units;
    shared.scan[2][warp] = mine.keys;
    shared.scan[3][warp] = mine.seen;
  }
  __syncthreads();
  pieces -= mine.pieces;
  units -= mine.units;
  WorkSum all = {};
#pragma unroll
  for (int w = 0; w < Config::kMaxThreads / 32; ++w) {
    if (w >= threads / 32) break;
    if (w == warp) {
      pieces += all.pieces;
      units += all.units;
    }
    all.pieces += shared.scan[0][w];
    all.units += shared.scan[1][w];
    all.keys += shared.scan[2][w];
    all.seen += shared.scan[3][w];
  }
  const Cut cut = cut_of<Config>(p, all, blocks);
  if (bucket >= cut.buckets) return {};

  const int64_t begin = cut.whole_units ? bucket : bucket_begin(bucket, cut.pieces, cut.buckets);
  int64_t before = cut.whole_units ? units : pieces;
  if (begin >= before && begin < before + (cut.whole_units ? mine.units : mine.pieces)) {
    int64_t seq = first;
    SequenceWork w = sequence_work<Config>(p, seq, cut.whole_units);
    for (; begin >= before + w.units * w.pieces; w = sequence_work<Config>(p, ++seq, cut.whole_units)) {
      before += w.units * w.pieces;
    }
    PartWalk& walk = shared.walk;
    walk.work = w;
    walk.seq = seq;
    walk.at = begin;
    walk.left = cut.whole_units ? 1 : bucket_begin(bucket + 1, cut.pieces, cut.buckets) - begin;
    walk.unit = (begin - before) / w.pieces;
    walk.piece = static_cast<int32_t>(begin - before - walk.unit * w.pieces);
    walk.whole_units = cut.whole_units;
    for (Part& part : shared.parts) next_part<Config>(p, walk, part);
  }
  __syncthreads();
  return cut;
}

}  // namespace pagedkern
