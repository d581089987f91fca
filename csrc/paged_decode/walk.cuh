// The schedule as a block sees it: its bucket, and the parts of units in it one after another.
#pragma once

#include "paged_decode/params.h"
#include "paged_decode/shared.cuh"

namespace pagedkern {

template <class Config>
static __device__ __forceinline__ SequenceWork sequence_work(const PagedDecodeParams& p, int64_t seq) {
  const PagedAttentionParams& op = p.op;
  SequenceWork w = {};
  w.query_begin = static_cast<int32_t>(seq);
  w.query_len = 1;
  if (op.cu_seqlens_q != nullptr) {
    w.query_begin = op.cu_seqlens_q[seq];
    w.query_len = op.cu_seqlens_q[seq + 1] - w.query_begin;
  }
  if (w.query_len < op.first_query_len || w.query_len > op.last_query_len || w.query_len <= 0) return w;
  w.seq_len = op.seq_lens[seq];
  w.keys.begin = visible_keys(static_cast<int64_t>(w.seq_len) - w.query_len, p.window, w.seq_len).begin;
  w.keys.end = visible_keys(static_cast<int64_t>(w.seq_len) - 1, p.window, w.seq_len).end;
  w.first_tile = w.keys.begin / Config::kTileKeys;
  w.tiles = w.keys.end > w.keys.begin ? ceil_div(w.keys.end, Config::kTileKeys) - w.first_tile : 1;
  w.piece_tiles = op.num_splits > 0 ? ceil_div(w.tiles, op.num_splits) : 1;
  w.pieces = ceil_div(w.tiles, w.piece_tiles);
  w.row_tiles = ceil_div(w.query_len * p.group, Config::kRows);
  w.units = static_cast<int64_t>(w.row_tiles) * op.cache.num_kv_heads;
  return w;
}

// The next part of the bucket, for one thread; one without steps behind the last.
template <class Config>
static __device__ __forceinline__ void next_part(const PagedDecodeParams& p, PartWalk& walk, Part& part) {
  part = Part{};
  if (walk.left == 0) return;
  while (walk.unit == walk.work.units) {  // another sequence; `left` says that there is one
    walk.work = sequence_work<Config>(p, ++walk.seq);
    walk.unit = 0;
  }
  const SequenceWork& work = walk.work;
  const int32_t rest = work.pieces - walk.piece;
  const int32_t taken = p.op.num_splits > 0 ? 1 : walk.left < rest ? static_cast<int32_t>(walk.left) : rest;
  part.seq = walk.seq;
  part.unit = walk.unit;
  part.unit_begin = walk.at - walk.piece;
  part.query_begin = work.query_begin;
  part.query_len = work.query_len;
  part.seq_len = work.seq_len;
  part.keys = work.keys;
  part.head = static_cast<int32_t>(walk.unit / work.row_tiles);
  part.row_tile = static_cast<int32_t>(walk.unit - part.head * static_cast<int64_t>(work.row_tiles));
  part.tile_begin = work.first_tile + walk.piece * work.piece_tiles;
  part.tile_end = work.first_tile + min((walk.piece + taken) * work.piece_tiles, work.tiles);
  part.piece = walk.piece;
  part.num_pieces = taken;
  part.unit_pieces = work.pieces;
  walk.at += taken;
  walk.left -= taken;
  walk.piece += taken;
  if (walk.piece == work.pieces) {
    walk.piece = 0;
    ++walk.unit;
  }
}

// The cut of all work, the same for every block.
struct Cut {
  int64_t pieces;
  int64_t buckets;
};

// Every block adds up the work of all sequences and finds where its bucket begins: shared.walk stands there.
// 0 buckets: nothing to do at all.
template <class Config>
static __device__ __forceinline__ Cut find_bucket(const PagedDecodeParams& p, PagedDecodeShared<Config>& shared) {
  const int64_t share = ceil_div<int64_t>(p.op.num_seqs, Config::kThreads);
  const int64_t first = threadIdx.x * share;
  const int64_t last = min(first + share, p.op.num_seqs);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t pieces = 0, units = 0;
  for (int64_t seq = first; seq < last; ++seq) {
    const SequenceWork w = sequence_work<Config>(p, seq);
    pieces += w.units * w.pieces;
    units += w.units;
  }
  int64_t before = pieces;  // of this thread and those below it in the warp
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(0xFFFFFFFFu, before, step);
    if (lane >= step) before += other;
    units += __shfl_xor_sync(0xFFFFFFFFu, units, step);
  }
  if (lane == 31) {
    shared.scan[0][warp] = before;
    shared.scan[1][warp] = units;
  }
  __syncthreads();
  before -= pieces;
  Cut cut = {0, 0};
  units = 0;
#pragma unroll
  for (int w = 0; w < Config::kWarps; ++w) {
    if (w == warp) before += cut.pieces;
    cut.pieces += shared.scan[0][w];
    units += shared.scan[1][w];
  }
  const bool pinned = p.op.num_splits > 0;
  cut.buckets =
      decode_buckets(cut.pieces, pinned ? cut.pieces : units, Config::least_tiles(cut.pieces, p.least_keys), gridDim.x);
  if (blockIdx.x >= cut.buckets) return {0, 0};

  const int64_t begin = bucket_begin(blockIdx.x, cut.pieces, cut.buckets);
  if (begin >= before && begin < before + pieces) {
    int64_t seq = first;
    SequenceWork w = sequence_work<Config>(p, seq);
    for (; begin >= before + w.units * w.pieces; w = sequence_work<Config>(p, ++seq)) before += w.units * w.pieces;
    PartWalk& walk = shared.walk;
    walk.work = w;
    walk.seq = seq;
    walk.at = begin;
    walk.left = bucket_begin(blockIdx.x + 1, cut.pieces, cut.buckets) - begin;
    walk.unit = (begin - before) / w.pieces;
    walk.piece = static_cast<int32_t>(begin - before - walk.unit * w.pieces);
    for (Part& part : shared.parts) next_part<Config>(p, walk, part);
  }
  __syncthreads();
  return cut;
}

}  // namespace pagedkern
