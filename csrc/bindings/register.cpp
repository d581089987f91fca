// The schemas and their kernels. The build's flag PAGEDKERN_NAMESPACE names the namespace.
#include <torch/csrc/stable/library.h>

#include "bindings/checks_only.h"
#include "bindings/ops.h"

namespace {

void def_ops(torch::stable::detail::StableLibrary& m) {
  m.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
      "Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def(
      "reshape_and_cache_dynamic(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor(c!) k_scale, Tensor(d!) v_scale, Tensor slot_mapping) -> ()");
  m.def(
      "rope_reshape_and_cache(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor(c!) key_cache, "
      "Tensor(d!) value_cache, Tensor positions, Tensor cos_sin_cache, Tensor slot_mapping, bool interleaved=False, "
      "Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
      "Tensor seq_lens, Tensor? cu_seqlens_q, int max_seqlen_q, int max_seqlen_k, float scale, bool causal=True, "
      "int window_left=-1, int window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "
      "Tensor? k_scale=None, Tensor? v_scale=None, Tensor(b!)? lse=None, int num_splits=0, "
      "Tensor(c!)? workspace=None) -> ()");
  m.def(
      "paged_attention_workspace_size(int num_tokens, int num_heads, int num_kv_heads, int head_dim, int num_seqs, "
      "int max_seqlen_q, int max_seqlen_k, int num_splits=0) -> int");
  m.def(
      "merge_attention_states(Tensor(a!) out, Tensor(b!)? lse, Tensor out_a, Tensor lse_a, Tensor out_b, "
      "Tensor lse_b) -> ()");
  m.def(
      "gather_cache(Tensor(a!) key, Tensor(b!) value, Tensor key_cache, Tensor value_cache, Tensor block_table, "
      "Tensor seq_lens, Tensor cu_seqlens, Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def("copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()");
  m.def("swap_blocks(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()");
#if !defined(PAGEDKERN_VGPU)
  m.def("_checks_only(int level) -> bool");
#endif
}

// The same functions serve every device: they pick their backend by the tensors' own.
void impl_ops(torch::stable::detail::StableLibrary& m) {
  namespace ops = pagedkern::bindings;
  m.impl("reshape_and_cache", TORCH_BOX(&ops::reshape_and_cache));
  m.impl("reshape_and_cache_dynamic", TORCH_BOX(&ops::reshape_and_cache_dynamic));
  m.impl("rope_reshape_and_cache", TORCH_BOX(&ops::rope_reshape_and_cache));
  m.impl("paged_attention", TORCH_BOX(&ops::paged_attention));
  m.impl("merge_attention_states", TORCH_BOX(&ops::merge_attention_states));
  m.impl("gather_cache", TORCH_BOX(&ops::gather_cache));
  m.impl("copy_blocks", TORCH_BOX(&ops::copy_blocks));
  m.impl("swap_blocks", TORCH_BOX(&ops::swap_blocks));
}

}  // namespace

STABLE_TORCH_LIBRARY(PAGEDKERN_NAMESPACE, m) {
  def_ops(m);
}

STABLE_TORCH_LIBRARY_IMPL(PAGEDKERN_NAMESPACE, CPU, m) {
  impl_ops(m);
}

#if !defined(PAGEDKERN_VGPU)
// Where the build has no CUDA kernels the call says how to get them.
STABLE_TORCH_LIBRARY_IMPL(PAGEDKERN_NAMESPACE, CUDA, m) {
  impl_ops(m);
}

STABLE_TORCH_LIBRARY_IMPL(PAGEDKERN_NAMESPACE, XPU, m) {
  impl_ops(m);
}
#endif

// It takes no tensor, so no device key would ever choose it.
STABLE_TORCH_LIBRARY_IMPL(PAGEDKERN_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("paged_attention_workspace_size", TORCH_BOX(&pagedkern::bindings::paged_attention_workspace_size));
#if !defined(PAGEDKERN_VGPU)
  m.impl("_checks_only", TORCH_BOX(&pagedkern::bindings::checks_only));
#endif
}
