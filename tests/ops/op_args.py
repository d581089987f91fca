"""Valid arguments of every op, small, as a dict in schema order: tests change one thing and see what happens."""

import torch

TOKENS, HEADS, KV_HEADS, DIM, BLOCKS, BLOCK_SIZE, SEQS = 3, 4, 2, 16, 5, 4, 3
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def rows(heads=KV_HEADS, tokens=TOKENS, dim=DIM, dtype=BF16):
    return torch.randn(tokens, heads, dim).to(dtype)


def cache(dtype=BF16, blocks=BLOCKS, block_size=BLOCK_SIZE, heads=KV_HEADS, dim=DIM):
    return torch.randn(blocks, block_size, heads, dim).to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def reshape_and_cache():
    return {"key": rows(), "value": rows(), "key_cache": cache(), "value_cache": cache(),
            "slot_mapping": torch.tensor([0, 7, 19]), "k_scale": None, "v_scale": None}  # fmt: skip


def reshape_and_cache_dynamic():
    scale = (BLOCKS, BLOCK_SIZE, KV_HEADS)
    return {"key": rows(), "value": rows(), "key_cache": cache(E4M3), "value_cache": cache(E4M3),
            "k_scale": torch.ones(scale), "v_scale": torch.ones(scale),
            "slot_mapping": torch.tensor([0, 7, 19])}  # fmt: skip


def rope_reshape_and_cache():
    return {"query": rows(HEADS), "key": rows(), "value": rows(), "key_cache": cache(), "value_cache": cache(),
            "positions": torch.tensor([0, 1, 9]), "cos_sin_cache": torch.randn(10, DIM),
            "slot_mapping": torch.tensor([0, 7, 19]), "interleaved": False, "k_scale": None,
            "v_scale": None}  # fmt: skip


def paged_attention():
    return {"out": rows(HEADS), "query": rows(HEADS), "key_cache": cache(), "value_cache": cache(),
            "block_table": torch.tensor([[0, 1], [2, 3], [4, 0]], dtype=torch.int32), "seq_lens": int32(8, 5, 1),
            "cu_seqlens_q": int32(0, 1, 2, 3), "max_seqlen_q": 1, "max_seqlen_k": 8, "scale": 0.25, "causal": True,
            "window_left": -1, "window_right": -1, "softcap": 0.0, "alibi_slopes": torch.rand(HEADS),
            "sinks": torch.rand(HEADS), "k_scale": None, "v_scale": None, "lse": torch.zeros(TOKENS, HEADS),
            "num_splits": 0, "workspace": torch.zeros(1 << 20, dtype=torch.uint8)}  # fmt: skip


def paged_attention_workspace_size():
    return {"num_tokens": 3, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "num_seqs": SEQS,
            "max_seqlen_q": 1, "max_seqlen_k": 8, "num_splits": 4}  # fmt: skip


def merge_attention_states():
    lse = torch.zeros(TOKENS, HEADS)
    return {"out": rows(HEADS), "lse": lse.clone(), "out_a": rows(HEADS), "lse_a": lse.clone(), "out_b": rows(HEADS),
            "lse_b": lse.clone()}  # fmt: skip


def gather_cache():
    return {"key": rows(tokens=14), "value": rows(tokens=14), "key_cache": cache(), "value_cache": cache(),
            "block_table": torch.tensor([[0, 1], [2, 3], [4, 0]], dtype=torch.int32), "seq_lens": int32(8, 5, 1),
            "cu_seqlens": int32(0, 8, 13, 14), "k_scale": None, "v_scale": None}  # fmt: skip


def copy_blocks():
    return {"key_caches": [cache(), cache()], "value_caches": [cache(), cache()],
            "block_mapping": torch.tensor([[0, 1], [2, 3]])}  # fmt: skip


def swap_blocks():
    return {"src": cache(), "dst": cache(blocks=4), "block_mapping": torch.tensor([[0, 1], [4, 3]])}


OPS = (
    reshape_and_cache,
    reshape_and_cache_dynamic,
    rope_reshape_and_cache,
    paged_attention,
    paged_attention_workspace_size,
    merge_attention_states,
    gather_cache,
    copy_blocks,
    swap_blocks,
)
MAKERS = {maker.__name__: maker for maker in OPS}
# What else the same shapes may hold: other slots, positions, lengths and tables, some of them to be skipped.
CHANGES = {
    "reshape_and_cache": {"slot_mapping": torch.tensor([12, -1, 3])},
    "reshape_and_cache_dynamic": {"slot_mapping": torch.tensor([5, 5, 18])},
    "rope_reshape_and_cache": {"slot_mapping": torch.tensor([-1, 2, 11]), "positions": torch.tensor([9, 0, 4])},
    "paged_attention": {
        "seq_lens": int32(2, 8, 0),
        "block_table": torch.tensor([[4, -1], [0, 3], [-7, 1 << 30]], dtype=torch.int32),
    },
    "gather_cache": {
        "seq_lens": int32(3, 8, 2),
        "cu_seqlens": int32(0, 3, 11, 13),
        "block_table": torch.tensor([[4, -1], [0, 3], [1, 1 << 30]], dtype=torch.int32),
    },
    "merge_attention_states": {"lse_a": torch.tensor([[0.0, 3.0, -float("inf"), 1.0]] * 3)},
    "copy_blocks": {"block_mapping": torch.tensor([[3, 4], [0, 7]])},
    "swap_blocks": {},
}


def tensors(args):
    """Every tensor among the arguments, lists opened."""
    for value in args.values():
        yield from (t for t in (value if isinstance(value, list) else [value]) if isinstance(t, torch.Tensor))


def memory(args):
    """A copy of all bytes behind the arguments, gaps between strides included."""
    return [torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).clone() for t in tensors(args)]
