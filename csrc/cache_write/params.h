// reshape_and_cache, reshape_and_cache_dynamic, rope_reshape_and_cache.
#pragma once

#include <cstdint>

#include "common/paged_cache.h"

namespace pagedkern {

struct CacheWriteParams {
  const void* key;             // [num_tokens, num_kv_heads, head_dim], dtype
  const void* value;           // [num_tokens, num_kv_heads, head_dim], dtype
  int64_t key_stride_token;    // elements
  int64_t key_stride_head;     // elements
  int64_t value_stride_token;  // elements
  int64_t value_stride_head;   // elements
  DType dtype;                 // of key and value; equals cache.dtype unless that is FP8

  PagedCache key_cache;
  PagedCache value_cache;
  PagedCacheShape cache;

  const void* slot_mapping;  // [num_slots] int64 or int32; negative: skip the token
  bool slot_is_int32;
  int64_t slot_stride;  // elements
  int64_t num_slots;    // rows written; later rows of key and value are not read

  KvScale k_scale;
  KvScale v_scale;
};

// reshape_and_cache_dynamic writes its scales through the same two KvScale members of CacheWriteParams.

struct RopeParams {
  void* query;                 // [num_tokens, num_heads, head_dim], rotated in place, dtype of CacheWriteParams
  void* key;                   // the same memory as CacheWriteParams::key, rotated in place
  int64_t query_stride_token;  // elements
  int64_t query_stride_head;   // elements
  int32_t num_heads;
  const void* positions;  // [num_tokens] int64 or int32
  bool position_is_int32;
  int64_t position_stride;    // elements
  const void* cos_sin_cache;  // [max_position, rotary_dim]: cos, then sin
  int64_t cos_sin_stride;     // elements between positions
  int64_t max_position;
  DType cos_sin_dtype;  // float32 or the dtype of query
  int32_t rotary_dim;
  bool interleaved;  // pairs (2i, 2i+1); else halves (i, i + rotary_dim / 2)
};

}  // namespace pagedkern
