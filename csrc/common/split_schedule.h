// Who computes what where blocks share out the keys of a call: pure functions of lengths and of a block's number, for
// the attention kernels, their launchers and tests.
//
// The work of a sequence is units (KV head, tile of query rows) of pieces. A piece is a tile of keys, or, where
// num_splits is given, one of that many stretches of the sequence's own tiles, or a whole unit. The pieces of all
// sequences, in order, are cut into equal buckets, one a block; a unit in several buckets has as many parts, and the
// block that finishes its part last merges them.
#pragma once

#include <cstdint>

#include "common/attention_mask.h"
#include "common/attention_params.h"

namespace pagedkern {

template <class T>
PAGEDKERN_HOST_DEVICE T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

constexpr int kMaxMultiprocessors = 144;  // a full GH100

// Query tokens of a sequence that num_splits splits at most; longer ones stay whole where it is given, so that the
// places of partial results are bounded by the number of sequences.
constexpr int32_t kMaxSplitQueryLen = 16;

// What such a kernel gets by value, beside what is its own.
struct SplitParams {
  PagedAttentionParams op;
  KeyWindow window;
  int32_t group;         // query heads of a KV head
  int32_t tile_rows;     // (query token, query head) pairs of a unit, where a sequence may have more
  int32_t least_keys;    // keys worth a bucket of their own
  int32_t max_buckets;   // with partial results
  int32_t place_tokens;  // where num_splits is given, one place of counters for so many query tokens; 0: for a sequence
  int32_t place_units;   // counters of a place
  int32_t max_splits;    // of a unit, for the places of partial results
  uint64_t* counters;    // of arrivals
  float* partials;       // [slots][floats of a slot]
};

// How many buckets `pieces` pieces of `units` units are worth: a whole unit needs no merging, a part of one should be
// least_tiles long.
PAGEDKERN_HOST_DEVICE int64_t num_buckets(int64_t pieces, int64_t units, int64_t least_tiles, int64_t blocks) {
  const int64_t worth = pieces / least_tiles > units ? pieces / least_tiles : units;
  const int64_t most = worth < pieces ? worth : pieces;
  return most < blocks ? most : blocks;
}

PAGEDKERN_HOST_DEVICE int64_t bucket_begin(int64_t bucket, int64_t pieces, int64_t buckets) {
  return bucket * pieces / buckets;
}

// The bucket that holds a piece.
PAGEDKERN_HOST_DEVICE int64_t bucket_of(int64_t piece, int64_t pieces, int64_t buckets) {
  return ((piece + 1) * buckets - 1) / pieces;
}

// What a sequence needs; units == 0: nothing. One that no row sees has one tile all the same.
struct SequenceWork {
  int32_t query_begin;
  int32_t query_len;
  int32_t seq_len;
  KeyRange keys;       // that some row sees
  int32_t first_tile;  // of the sequence
  int32_t tiles;
  int32_t piece_tiles;
  int32_t pieces;  // of a unit
  int32_t row_tiles;
  int64_t units;
};

// Some consecutive pieces of a unit.
struct Part {
  int64_t seq;
  int64_t unit;        // of the sequence
  int64_t unit_begin;  // its first piece, of all
  int32_t query_begin;
  int32_t query_len;
  int32_t seq_len;
  KeyRange keys;  // that some row of the sequence sees
  int32_t head;   // KV head
  int32_t row_tile;
  int32_t tile_begin;  // of the sequence's keys
  int32_t tile_end;    // equal: no part, the bucket has ended
  int32_t piece;
  int32_t num_pieces;
  int32_t unit_pieces;
};

// Where a block is in its bucket, and the next part to be listed.
struct PartWalk {
  SequenceWork work;
  int64_t seq;
  int64_t unit;
  int64_t at;    // piece, of all
  int64_t left;  // pieces
  int32_t piece;
  bool whole_units;
};

// In the shared memory of a block. kParts: parts listed ahead, a ring.
template <int kWarps, int kParts>
struct SplitShared {
  PartWalk walk;
  Part parts[kParts];
  int64_t scan[4][kWarps];
  int32_t last;
};

// whole_units: a piece is a unit. Config: kTileKeys of a tile of keys, kManyRowTiles where a sequence may have more
// rows than one unit takes.
template <class Config>
PAGEDKERN_HOST_DEVICE SequenceWork sequence_work(const SplitParams& p, int64_t seq, bool whole_units) {
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
  w.piece_tiles = 1;
  if (op.num_splits > 0) w.piece_tiles = ceil_div(w.tiles, op.num_splits < w.tiles ? op.num_splits : w.tiles);
  if (whole_units || (op.num_splits > 0 && w.query_len > kMaxSplitQueryLen)) w.piece_tiles = w.tiles;
  w.pieces = ceil_div(w.tiles, w.piece_tiles);
  w.row_tiles = 1;
  if constexpr (Config::kManyRowTiles) {
    w.row_tiles = static_cast<int32_t>(ceil_div<int64_t>(static_cast<int64_t>(w.query_len) * p.group, p.tile_rows));
  }
  w.units = static_cast<int64_t>(w.row_tiles) * op.cache.num_kv_heads;
  return w;
}

// The next part of the bucket, for one thread; one without tiles behind the last.
template <class Config>
PAGEDKERN_HOST_DEVICE void next_part(const SplitParams& p, PartWalk& walk, Part& part) {
  part = Part{};
  if (walk.left == 0) return;
  while (walk.unit == walk.work.units) {  // another sequence; `left` says that there is one
    walk.work = sequence_work<Config>(p, ++walk.seq, walk.whole_units);
    walk.unit = 0;
  }
  const SequenceWork& work = walk.work;
  const int32_t rest = work.pieces - walk.piece;
  const int32_t taken = p.op.num_splits > 0 ? 1 : walk.left < rest ? static_cast<int32_t>(walk.left) : rest;
  const int32_t end = (walk.piece + taken) * work.piece_tiles;
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
  part.tile_end = work.first_tile + (end < work.tiles ? end : work.tiles);
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

// The work of some sequences.
struct WorkSum {
  int64_t pieces;
  int64_t units;
  int64_t keys;  // that some row sees, of every unit
  int64_t seen;  // of these, by the sequence's middle row

  template <class Config>
  PAGEDKERN_HOST_DEVICE void add(const SplitParams& p, int64_t seq) {
    const SequenceWork w = sequence_work<Config>(p, seq, false);
    pieces += w.units * w.pieces;
    units += w.units;
    if constexpr (Config::kManyRowTiles) {
      const int64_t middle = static_cast<int64_t>(w.seq_len) - w.query_len + w.query_len / 2;
      const KeyRange range = visible_keys(middle, p.window, w.seq_len);
      if (w.keys.end > w.keys.begin) keys += w.units * (w.keys.end - w.keys.begin);
      if (range.end > range.begin) seen += w.units * (range.end - range.begin);
    }
  }
};

// The cut of all work, the same for every block.
struct Cut {
  int64_t pieces;
  int64_t buckets;
  bool whole_units;
};

// Tiles of rows of one sequence that see different keys have different work, though as many tiles: where that is more
// than a quarter (a long prompt without context), each is a bucket of its own, which the device deals out as blocks
// become free; the grid is large enough. Else, where a few buckets less make whole numbers of them for a unit, so many:
// most edges then need no merging.
template <class Config>
PAGEDKERN_HOST_DEVICE Cut cut_of(const SplitParams& p, const WorkSum& all, int64_t blocks) {
  if (p.op.num_splits > 0) return {all.pieces, num_buckets(all.pieces, all.pieces, 1, blocks), false};
  if (Config::kManyRowTiles && 4 * all.seen < 3 * all.keys) return {all.units, all.units, true};
  const int64_t most = blocks < p.max_buckets ? blocks : p.max_buckets;
  int64_t buckets = num_buckets(all.pieces, all.units, Config::least_tiles(all.pieces, all.units, p.least_keys), most);
  if (Config::kManyRowTiles && all.units > 0) {
    const int64_t rest = buckets % all.units;  // all of them where units are more
    if (rest < buckets && 8 * rest <= buckets) buckets -= rest;
  }
  return {all.pieces, buckets, false};
}

}  // namespace pagedkern
