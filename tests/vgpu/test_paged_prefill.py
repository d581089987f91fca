"""The prefill kernel: gates on what it does, and what only it can get wrong."""

import pytest
import torch

from bench.bench_paged_prefill import CASES, run, tile_work
from pagedkern.testing import compare
from pagedkern.testing.backends import BACKENDS
from pagedkern.testing.paged import page

RANDOM = next(backend for backend in BACKENDS if backend.order == (2, "random"))
GATED = [case for case in CASES if case[0] in ("prefill 512", "prefill 512, e4m3", "prefill 256, head_dim 256")]


@pytest.mark.parametrize("name,shape,dtype", GATED, ids=[name for name, _, _ in GATED])
def test_gates(name, shape, dtype):
    report = run(shape, dtype)
    flops, pairs = tile_work(shape)
    assert report["tensor_flops"] <= flops, "more than whole tiles up to the diagonal"
    assert report["tensor_flops"] <= 1.08 * shape.causal_flops
    assert report["shared_bank_conflicts"] == 0
    query_bytes = shape.num_tokens * shape.num_heads * shape.head_dim * 2
    once = 2 * pairs * shape.head_dim * dtype.itemsize
    # Beside keys and values once per query tile: page ids, four bytes for a key and four for its value, and lengths.
    assert report["global_load_bytes"] - query_bytes <= 1.03 * (once + 8 * pairs)
    assert report["global_store_bytes"] == query_bytes


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e3], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_v_scales_of_any_size_leave_the_weights_in_range(dtype, spread):
    """Scales per token a thousand apart, rising, falling and mixed, around `spread`."""
    tokens, kv_heads, q_len = 150, 2, 20
    for order in ("rising", "falling", "mixed"):
        exponents = torch.linspace(-1.5, 1.5, tokens)
        if order != "rising":
            exponents = exponents.flip(0) if order == "falling" else exponents[torch.randperm(tokens)]
        scales = spread * 10**exponents
        keys, values = torch.randn(2, tokens, kv_heads, 64)
        blocks = -(-tokens // 16) + 2
        v_scale = torch.ones(blocks, 16, kv_heads)
        batch = page([keys], [torch.zeros_like(values)], dtype=torch.float8_e4m3fn, v_scale=v_scale)
        position = torch.arange(tokens)
        place = batch.block_table[0].long()[position // 16], position % 16
        v_scale[place] = scales[:, None].expand(tokens, kv_heads)
        batch.value_cache[place] = values.to(torch.float8_e4m3fn)
        query = torch.randn(q_len, 4, 64).to(dtype)
        out, _ = batch.attend(RANDOM, query, [q_len], scale=0.1)
        expected, _ = batch.attend(None, query, [q_len], scale=0.1)
        assert expected.abs().max() > 30 * spread / tokens
        if dtype == torch.bfloat16 or spread >= 1:
            compare.assert_close(out, expected, dtype)
        else:  # below float16's normal numbers the output itself is rounded coarsely: half its last bit, and some
            torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=6e-8)
