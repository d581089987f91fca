// Who computes what: pure functions of lengths and of a block's number, for the kernel, the launcher and their tests.
//
// The work of a sequence is units (KV head, tile of query rows) of pieces. A piece is a tile of keys, or, where
// num_splits is given, one of that many stretches of the sequence's own tiles. The pieces of all sequences, in order,
// are cut into equal buckets, one a block; a unit in several buckets has as many parts, and the block that finishes its
// part last merges them.
#pragma once

#include <cstdint>

#include "common/paged_cache.h"

namespace pagedkern {

template <class T>
PAGEDKERN_HOST_DEVICE T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// How many buckets `pieces` pieces of `units` units are worth: a whole unit needs no merging, a part of one should be
// least_tiles long.
PAGEDKERN_HOST_DEVICE int64_t decode_buckets(int64_t pieces, int64_t units, int64_t least_tiles, int64_t blocks) {
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

// Floats of a partial result: (reference, sum) of every row, then the rows.
PAGEDKERN_HOST_DEVICE int64_t slot_floats(int64_t rows, int64_t head_dim) {
  return ceil_div<int64_t>(rows * (head_dim + 2), 4) * 4;
}

// Keys that a part of `rows` query rows must have for its partial result, written and read once, and its query to be
// less than 3 % of its traffic (4 % for FP8).
inline int64_t least_part_keys(int64_t rows, DType cache) {
  return rows * (is_fp8(cache) ? 176 : 112);
}

}  // namespace pagedkern
