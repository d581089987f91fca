// Decode attention: the sequences of a call with few query tokens. Which they are is the dispatch's choice
// (first_query_len and last_query_len of the params); any such length is right, up to kMaxDecodeQueryLen is quick.
#pragma once

#include <cstdint>
#include <vector>

#include "common/attention_params.h"
#include "common/status.h"

namespace pagedkern {

// Beyond it, tiles over the query read keys and values less often.
constexpr int64_t kMaxDecodeQueryLen = 16;

// Whether sequences of 1 to kMaxDecodeQueryLen query tokens of this call can go to this kernel: always, so far. The
// answer never depends on the batch or on the bounds, so that a row is computed the same way beside any others.
bool paged_decode_takes(const PagedAttentionParams& params);

// Bytes of params.workspace; they may hold anything before a launch, and concurrent launches must not share them.
int64_t paged_decode_workspace_size(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                    int64_t num_seqs, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t num_splits);

// One launch. `stream` is a cudaStream_t of the current device.
Status launch_paged_decode(const PagedAttentionParams& params, void* stream);

// What the schedule comes to where each sequence has one query token and num_splits is 0; for tests and benches.
struct DecodePlan {
  std::vector<int64_t> bucket_tiles;  // tiles of keys that each busy block computes
  int64_t partial_bytes = 0;          // of partial results, written and read
  int64_t tile_keys = 0;
  int64_t bytes_in_flight = 0;  // of a multiprocessor, at most
  int64_t blocks_per_multiprocessor = 0;
};
DecodePlan paged_decode_plan(const std::vector<int32_t>& seq_lens, int64_t num_heads, int64_t num_kv_heads,
                             int64_t head_dim, DType cache, int64_t multiprocessors);

}  // namespace pagedkern
