// The ops as register.cpp boxes them; argument order and types are those of the schemas there.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace pagedkern::bindings {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& slot_mapping, const OptionalTensor& k_scale, const OptionalTensor& v_scale);

void reshape_and_cache_dynamic(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                               const Tensor& value_cache, const Tensor& k_scale, const Tensor& v_scale,
                               const Tensor& slot_mapping);

void rope_reshape_and_cache(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                            const Tensor& value_cache, const Tensor& positions, const Tensor& cos_sin_cache,
                            const Tensor& slot_mapping, bool interleaved, const OptionalTensor& k_scale,
                            const OptionalTensor& v_scale);

void paged_attention(const Tensor& out, const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                     const Tensor& block_table, const Tensor& seq_lens, const OptionalTensor& cu_seqlens_q,
                     int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, bool causal, int64_t window_left,
                     int64_t window_right, double softcap, const OptionalTensor& alibi_slopes,
                     const OptionalTensor& sinks, const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                     const OptionalTensor& lse, int64_t num_splits, const OptionalTensor& workspace);

int64_t paged_attention_workspace_size(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                       int64_t num_seqs, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                       int64_t num_splits);

void merge_attention_states(const Tensor& out, const OptionalTensor& lse, const Tensor& out_a, const Tensor& lse_a,
                            const Tensor& out_b, const Tensor& lse_b);

void gather_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                  const Tensor& block_table, const Tensor& seq_lens, const Tensor& cu_seqlens,
                  const OptionalTensor& k_scale, const OptionalTensor& v_scale);

void copy_blocks(std::vector<Tensor> key_caches, std::vector<Tensor> value_caches, const Tensor& block_mapping);

void swap_blocks(const Tensor& src, const Tensor& dst, const Tensor& block_mapping);

}  // namespace pagedkern::bindings
