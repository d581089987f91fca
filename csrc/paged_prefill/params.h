// What the prefill kernel gets by value: the op's arguments and what the launcher derives from them.
#pragma once

#include <cstdint>

#include "common/split_schedule.h"

namespace pagedkern {

struct PagedPrefillParams : SplitParams {
  int64_t num_units;     // upper bound over all sequences
  uint32_t block_size;   // no longer than any sequence, so 32 bits do
  int32_t query_width;   // bytes of the widest access that fits every row: 16, 8 or the element's own
  int32_t cache_width;   // likewise, of keys and values
  int32_t out_width;     // 16 or 2
  int32_t slot_threads;  // of a partial result: those of the warps that have rows
  int32_t block_rows;    // of tile_rows: what each block of a cluster has
  int32_t cluster_log;   // of 2^cluster_log blocks, which share what they load
};

}  // namespace pagedkern
