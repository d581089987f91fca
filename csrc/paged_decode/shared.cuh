// The shared memory of a block.
#pragma once

#include "common/attention_mask.h"
#include "paged_decode/config.h"

namespace pagedkern {

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
};

template <class Config>
struct PagedDecodeShared {
  alignas(1024) uint8_t slots[Config::kWarps][Config::kSlots][Config::kSlotBytes];  // each warp's ring of keys, values
  float scale[Config::kWarps][Config::kGeneral ? Config::kSlots : 1][2][Config::kGeneral ? Config::kWarpKeys : 4];
  alignas(16) float sums[Config::kWarps][Config::kRows][Config::kSumPitch];  // of the warps, to be merged
  float sum[Config::kWarps][Config::kRows];
  float reference[Config::kWarps][Config::kRows];
  alignas(16) uint16_t query[Config::kRows][Config::kQueryPitch];
  float factor[Config::kRows];  // from q.k to the score in base 2
  float slope[Config::kRows];   // ALiBi, base 2
  int32_t position[Config::kRows];
  int32_t begin[Config::kRows];  // keys the row sees
  int32_t end[Config::kRows];
  PartWalk walk;
  Part parts[Config::kParts];  // a ring
  int64_t scan[2][Config::kWarps];
  int32_t last;
};

}  // namespace pagedkern
