// What the prefill kernel gets by value: the op's arguments and what the launcher derives from them.
#pragma once

#include <cstdint>

#include "common/attention_mask.h"
#include "common/attention_params.h"

namespace pagedkern {

struct PagedPrefillParams {
  PagedAttentionParams op;
  KeyWindow window;
  int64_t num_tiles;    // upper bound over all sequences, of one KV head
  int32_t group;        // query heads of a KV head
  uint32_t block_size;  // no longer than any sequence, so 32 bits do
  int32_t query_width;  // bytes of the widest access that fits every row: 16, 8 or the element's own
  int32_t cache_width;  // likewise, of keys and values
  int32_t out_width;    // 16 or 2
};

}  // namespace pagedkern
