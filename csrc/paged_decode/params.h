// What the decode kernel gets by value: the op's arguments and what the launcher derives from them.
#pragma once

#include <cstdint>

#include "common/attention_mask.h"
#include "common/attention_params.h"

namespace pagedkern {

struct PagedDecodeParams {
  PagedAttentionParams op;
  KeyWindow window;
  int32_t group;        // query heads of a KV head
  uint32_t block_size;  // no longer than any sequence, so 32 bits do
  int32_t query_width;  // bytes of the widest access that fits every row: 16 or 2
  int32_t cache_width;  // likewise, of keys and values: 16, 8, 4, 2 or 1
  int32_t out_width;    // 8 or 2
  bool slabs_in_pages;  // 16 keys from a multiple of 16 on lie in one page, in rows of the padded head_dim
  int32_t token_tiles;  // row tiles of one query token of one KV head
  int32_t seq_tokens;   // places of partial results by sequence, this many tokens each; 0: one for every token
  int32_t max_splits;   // of a sequence, for the places of partial results
  int32_t slot_rows;    // rows of a partial result
  int32_t least_keys;   // keys worth a bucket of their own
  uint64_t* counters;   // of arrivals, see counter_word in schedule.h
  float* partials;      // [slots][slot_floats(slot_rows, head_dim)]
};

}  // namespace pagedkern
