// Decode attention: the sequences of a call with few query rows. Which they are is the dispatch's choice
// (first_query_len and last_query_len of the params): those of 1 to max_decode_query_len tokens, or fewer.
#pragma once

#include <cstdint>
#include <vector>

#include "common/attention_params.h"
#include "common/status.h"

namespace pagedkern {

// (query token, query head) pairs of a KV head that one tile takes. More of them read keys and values less often in the
// larger tiles of paged_prefill.
constexpr int64_t kMaxDecodeRows = 16;

// 0: more heads share a KV head than a tile has rows.
constexpr int64_t max_decode_query_len(int64_t group) {
  return kMaxDecodeRows / group;
}

// Bytes of params.workspace; they may hold anything before a launch, and concurrent launches must not share them.
int64_t paged_decode_workspace_size(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                    int64_t num_seqs, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t num_splits);

// One launch. `stream` is a cudaStream_t of the current device.
Status launch_paged_decode(const PagedAttentionParams& params, void* stream);

// What the schedule comes to where each sequence has one query token of at most kMaxDecodeRows heads of a KV head, and
// num_splits is 0; for tests and benches.
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
