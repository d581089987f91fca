// gather_cache.
#pragma once

#include <cstdint>

#include "common/paged_cache.h"

namespace pagedkern {

struct GatherCacheParams {
  void* key;                   // [total, num_kv_heads, head_dim], dtype
  void* value;                 // [total, num_kv_heads, head_dim], dtype
  int64_t key_stride_token;    // elements
  int64_t key_stride_head;     // elements
  int64_t value_stride_token;  // elements
  int64_t value_stride_head;   // elements
  int64_t total;               // rows of key and value
  DType dtype;

  PagedCache key_cache;
  PagedCache value_cache;
  PagedCacheShape cache;
  KvScale k_scale;
  KvScale v_scale;

  const int32_t* block_table;  // [num_seqs, max_blocks]
  int64_t block_table_stride;  // elements between sequences
  int64_t max_blocks;
  const int32_t* seq_lens;    // [num_seqs]
  const int32_t* cu_seqlens;  // [num_seqs + 1], running sum of seq_lens
  int64_t num_seqs;
};

}  // namespace pagedkern
