// What the decode kernel gets by value: the op's arguments and what the launcher derives from them.
#pragma once

#include <cstdint>

#include "common/split_schedule.h"

namespace pagedkern {

// A slot of partial results holds (reference, sum) of slot_rows rows, then the rows.
struct PagedDecodeParams : SplitParams {
  uint32_t block_size;  // no longer than any sequence, so 32 bits do
  int32_t query_width;  // bytes of the widest access that fits every row: 16 or 2
  int32_t cache_width;  // likewise, of keys and values: 16, 8, 4, 2 or 1
  int32_t out_width;    // 8 or 2
  bool slabs_in_pages;  // 16 keys from a multiple of 16 on lie in one page, in rows of the padded head_dim
  int32_t slot_rows;    // rows of a partial result
};

// Floats of a slot.
PAGEDKERN_HOST_DEVICE int64_t slot_floats(int64_t rows, int64_t head_dim) {
  return ceil_div<int64_t>(rows * (head_dim + 2), 4) * 4;
}

// Keys that a part of `rows` query rows must have for its partial result, written and read once, and its query to be
// less than 3 % of its traffic (4 % for FP8).
inline int64_t least_part_keys(int64_t rows, DType cache) {
  return rows * (is_fp8(cache) ? 176 : 112);
}

}  // namespace pagedkern
