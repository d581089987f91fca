"""Registers the reference as torch.ops.pagedkern_reference.*: the op contract's schemas, one more backend."""

import torch

from pagedkern.reference import attention, cache

NAMESPACE = "pagedkern_reference"

SCHEMAS = {
    "reshape_and_cache": """(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,
        Tensor slot_mapping, Tensor? k_scale=None, Tensor? v_scale=None) -> ()""",
    "reshape_and_cache_dynamic": """(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,
        Tensor(c!) k_scale, Tensor(d!) v_scale, Tensor slot_mapping) -> ()""",
    "rope_reshape_and_cache": """(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor(c!) key_cache,
        Tensor(d!) value_cache, Tensor positions, Tensor cos_sin_cache, Tensor slot_mapping, bool interleaved=False,
        Tensor? k_scale=None, Tensor? v_scale=None) -> ()""",
    "paged_attention": """(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table,
        Tensor seq_lens, Tensor? cu_seqlens_q, int max_seqlen_q, int max_seqlen_k, float scale, bool causal=True,
        int window_left=-1, int window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None,
        Tensor? k_scale=None, Tensor? v_scale=None, Tensor(b!)? lse=None, int num_splits=0,
        Tensor(c!)? workspace=None) -> ()""",
    "paged_attention_workspace_size": """(int num_tokens, int num_heads, int num_kv_heads, int head_dim, int num_seqs,
        int max_seqlen_q, int max_seqlen_k, int num_splits=0) -> int""",
    "merge_attention_states": """(Tensor(a!) out, Tensor(b!)? lse, Tensor out_a, Tensor lse_a, Tensor out_b,
        Tensor lse_b) -> ()""",
    "gather_cache": """(Tensor(a!) key, Tensor(b!) value, Tensor key_cache, Tensor value_cache, Tensor block_table,
        Tensor seq_lens, Tensor cu_seqlens, Tensor? k_scale=None, Tensor? v_scale=None) -> ()""",
    "copy_blocks": "(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()",
    "swap_blocks": "(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()",
}


def paged_attention(
    out, query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, scale,
    causal=True, window_left=-1, window_right=-1, softcap=0.0, alibi_slopes=None, sinks=None, k_scale=None,
    v_scale=None, lse=None, num_splits=0, workspace=None,
) -> None:  # fmt: skip
    result, result_lse = attention.paged_attention(
        query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, scale=scale, causal=causal,
        window_left=window_left, window_right=window_right, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    rows = query.size(0) if cu_seqlens_q is None else int(cu_seqlens_q[-1])
    out[:rows] = result[:rows].to(out.dtype)
    if lse is not None:
        lse[:rows] = result_lse[:rows].float()


def paged_attention_workspace_size(*sizes: int) -> int:
    return 0


def merge_attention_states(out, lse, out_a, lse_a, out_b, lse_b) -> None:
    result, result_lse = attention.merge_attention_states(out_a, lse_a, out_b, lse_b)
    out.copy_(result.to(out.dtype))
    if lse is not None:
        lse.copy_(result_lse.float())


IMPLEMENTATIONS = {
    "reshape_and_cache": cache.reshape_and_cache,
    "reshape_and_cache_dynamic": cache.reshape_and_cache_dynamic,
    "rope_reshape_and_cache": cache.rope_reshape_and_cache,
    "paged_attention": paged_attention,
    "paged_attention_workspace_size": paged_attention_workspace_size,
    "merge_attention_states": merge_attention_states,
    "gather_cache": cache.gather_cache,
    "copy_blocks": cache.copy_blocks,
    "swap_blocks": cache.swap_blocks,
}


def register(namespace: str, implementations: dict) -> torch.library.Library:
    """Defines every op of the contract in `namespace`; the library lives as long as what is returned."""
    library = torch.library.Library(namespace, "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, implementations[name], "CompositeExplicitAutograd")
        if schema.endswith("-> ()"):
            torch.library.register_fake(f"{namespace}::{name}", lambda *args, **kwargs: None, lib=library)
    return library


LIBRARY = register(NAMESPACE, IMPLEMENTATIONS)
