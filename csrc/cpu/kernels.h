// The CPU kernels, one file per op, free of torch. The caller (csrc/bindings) has checked every argument;
// threads come from the caller's pool through ParallelFor.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "block_copy/params.h"
#include "cache_write/params.h"
#include "common/attention_params.h"
#include "gather/params.h"
#include "merge_states/params.h"
#include "quantized_linear/params.h"

namespace pagedkern::cpu {

// Runs body(begin, end) over [0, count) in pieces of at least `grain`, on num_threads() threads.
struct ThreadPool {
  std::function<void(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body)> parallel_for;
  int num_threads;
};

void reshape_and_cache(const CacheWriteParams& params, const ThreadPool& pool);
void reshape_and_cache_dynamic(const CacheWriteParams& params, const ThreadPool& pool);
void rope_reshape_and_cache(const CacheWriteParams& params, const RopeParams& rope, const ThreadPool& pool);
void copy_blocks(const CopyBlocksParams& params, const ThreadPool& pool);
void gather_cache(const GatherCacheParams& params, const ThreadPool& pool);
void merge_attention_states(const MergeStatesParams& params, const ThreadPool& pool);
void paged_attention(const PagedAttentionParams& params, const ThreadPool& pool);
void quantized_linears(const QuantizedLinearsParams& params, const ThreadPool& pool);

// Bytes paged_attention may use for split partials with these upper bounds; 0 where it needs none.
int64_t paged_attention_workspace_size(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                       int64_t num_seqs, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                       int64_t num_splits);

// "avx512_bf16", "avx512", "avx2" or "generic": what this machine runs.
const char* simd_level();

}  // namespace pagedkern::cpu
