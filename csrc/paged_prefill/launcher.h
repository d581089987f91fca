#pragma once

#include <cstdint>
#include <vector>

#include "common/attention_params.h"
#include "common/status.h"

namespace pagedkern {

// The sequences of first_query_len to last_query_len query tokens; any such length is right. `stream` is a cudaStream_t
// of the current device.
Status launch_paged_prefill(const PagedAttentionParams& params, void* stream);

// Bytes of params.workspace; they may hold anything before a launch, and concurrent launches must not share them.
int64_t paged_prefill_workspace_size(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                     int64_t num_seqs, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t num_splits,
                                     int64_t first_query_len);

// What the schedule comes to for causal sequences that all go to this kernel, num_splits 0; for tests and benches.
struct PrefillPlan {
  std::vector<int64_t> bucket_tiles;  // tiles of keys that each busy block computes
  int64_t partial_bytes;              // of partial results, written and read
  int64_t tile_keys;
};
PrefillPlan paged_prefill_plan(const std::vector<int32_t>& cu_seqlens_q, const std::vector<int32_t>& seq_lens,
                               int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, DType cache,
                               int64_t multiprocessors);

}  // namespace pagedkern
