// merge_attention_states.
#pragma once

#include <cstdint>

#include "common/dtypes.h"

namespace pagedkern {

struct MergeStatesParams {
  void* out;           // [num_tokens, num_heads, head_dim], out_dtype; may be out_a or out_b
  float* lse;          // [num_tokens, num_heads] or null; may be lse_a or lse_b
  const void* out_a;   // [num_tokens, num_heads, head_dim], a_dtype
  const void* out_b;   // [num_tokens, num_heads, head_dim], b_dtype
  const float* lse_a;  // [num_tokens, num_heads], natural logarithm
  const float* lse_b;
  int64_t out_stride_token, out_stride_head;      // elements
  int64_t a_stride_token, a_stride_head;          // elements
  int64_t b_stride_token, b_stride_head;          // elements
  int64_t lse_stride_token, lse_stride_head;      // elements
  int64_t lse_a_stride_token, lse_a_stride_head;  // elements
  int64_t lse_b_stride_token, lse_b_stride_head;  // elements
  int64_t num_tokens;
  int32_t num_heads;
  int32_t head_dim;
  DType out_dtype;
  DType a_dtype;  // out_dtype or float32
  DType b_dtype;  // out_dtype or float32
};

}  // namespace pagedkern
