// paged_attention: one struct for the decode and the prefill kernels of every backend.
#pragma once

#include <cstdint>

#include "common/paged_cache.h"

namespace pagedkern {

struct PagedAttentionParams {
  void* out;                   // [num_tokens, num_heads, head_dim], dtype
  const void* query;           // [num_tokens, num_heads, head_dim], dtype
  int64_t out_stride_token;    // elements
  int64_t out_stride_head;     // elements
  int64_t query_stride_token;  // elements, may be 0
  int64_t query_stride_head;   // elements, may be 0
  int64_t num_tokens;          // rows of query and out; rows past cu_seqlens_q[num_seqs] are padding
  int32_t num_heads;
  DType dtype;

  PagedCache key_cache;
  PagedCache value_cache;
  PagedCacheShape cache;
  KvScale k_scale;
  KvScale v_scale;

  const int32_t* block_table;  // [num_seqs, max_blocks]
  int64_t block_table_stride;  // elements between sequences
  int64_t max_blocks;
  const int32_t* seq_lens;      // [num_seqs], keys stored, current tokens included
  const int32_t* cu_seqlens_q;  // [num_seqs + 1] or null: one query token per sequence
  int64_t num_seqs;
  int64_t max_seqlen_q;  // upper bound
  int64_t max_seqlen_k;  // upper bound
  // A launch takes the sequences with this many query tokens and leaves the rest to another launch of the same call,
  // so that the kernel that computes a row depends on its own sequence alone.
  int64_t first_query_len;  // at least
  int64_t last_query_len;   // at most

  float scale;
  bool causal;
  int64_t window_left;        // keys before the query's own, -1: unbounded
  int64_t window_right;       // keys after the query's own, -1: unbounded
  float softcap;              // 0: off
  const float* alibi_slopes;  // [num_heads] or null
  const float* sinks;         // [num_heads] or null

  float* lse;                // [num_tokens, num_heads] or null, natural logarithm
  int64_t lse_stride_token;  // elements
  int64_t lse_stride_head;   // elements

  int32_t num_splits;  // 0: chosen by the backend; split edges come from the sequence's own length
  void* workspace;     // [workspace_bytes], any content, or null
  int64_t workspace_bytes;
};

}  // namespace pagedkern
