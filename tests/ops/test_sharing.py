"""Memory, batches and threads shared with others: fused projections, poisoned neighbours, calls at the same time."""

import threading
from dataclasses import replace

import pytest
import torch

from pagedkern.testing import compare
from pagedkern.testing.cases import BF16, E4M3, FP32, AttentionCase
from pagedkern.testing.inputs import build_attention
from pagedkern.testing.paged import page


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_rope_on_the_three_parts_of_one_projection(backend, dtype):
    """query, key and value are slices of one tensor: their extents overlap, their elements do not."""
    heads, kv_heads, head_dim, tokens = 6, 2, 64, 11
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    apart = [part.clone().view(tokens, -1, head_dim) for part in fused.split([384, 128, 128], 1)]
    parts = [part.view(tokens, -1, head_dim) for part in fused.split([384, 128, 128], 1)]
    angles = torch.arange(32)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    turn = (torch.arange(tokens) + 3, torch.cat([angles.cos(), angles.sin()], 1))
    results = []
    for query, key, value in (parts, apart):
        caches = [torch.zeros(2, 16, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
        backend.op("rope_reshape_and_cache")(query, key, value, *caches, *turn, torch.arange(tokens) + 5)
        results.append((query, key, value, *caches))
    for name, got, wanted in zip(("query", "key", "value", "key_cache", "value_cache"), *results, strict=True):
        compare.assert_same_bytes(got, wanted, name)


def test_attention_writes_beside_its_query(backend):
    """out and query are the halves of every row of one tensor."""
    both = torch.zeros(3, 8, 64).bfloat16()
    query, out = both[:, :4], both[:, 4:]
    query.copy_(torch.randn(query.shape))
    lengths = (5, 40, 17)
    batch = page([torch.randn(n, 2, 64) for n in lengths], [torch.randn(n, 2, 64) for n in lengths], dtype=BF16)
    tensors = (batch.key_cache, batch.value_cache, batch.block_table, batch.seq_lens, None)
    backend.op("paged_attention")(out, query, *tensors, 1, 40, 0.125)
    compare.assert_close(out, batch.attend(None, query, scale=0.125)[0], BF16)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("q_lens", [None, (1, 4, 1, 9)])
@pytest.mark.parametrize("part", ["key", "value", "query"])
def test_a_poisoned_sequence_keeps_its_poison(backend, part, q_lens, num_splits, poison):
    """Live NaN and inf reach the rows of their own sequence and KV head, and no other row by a bit."""
    case = AttentionCase("poison", (40, 100, 300, 17), q_lens, heads=(4, 2), num_splits=num_splits, block_size=8)
    clean, sick = build_attention(case), build_attention(case)
    starts = [0, *torch.tensor(case.query_lens).cumsum(0).tolist()]
    rows = slice(starts[1], starts[2])
    if part == "query":
        sick.query.view[rows, :2] = poison
    else:
        # Position 50 of sequence 1, seen by all its rows.
        getattr(sick.cache, part)[int(sick.block_table[1, 50 // 8]), 50 % 8, 0] = poison
    for inputs in (clean, sick):
        inputs.call(backend.op("paged_attention"))
    healthy = torch.ones(sick.out.view.shape[:2], dtype=torch.bool)
    healthy[rows, :2] = False
    compare.assert_same_bytes(sick.out.view[healthy], clean.out.view[healthy], "out of other rows")
    compare.assert_same_bytes(sick.lse.view[healthy], clean.lse.view[healthy], "lse of other rows")
    if part != "value" and poison == poison:
        return  # what an infinite score does to its own row is the softmax's affair
    touched = sick.out.view[rows, :2]
    assert (touched.isnan() if poison != poison else ~touched.isfinite()).all()


def test_calls_from_several_threads_do_not_disturb_each_other(backend):
    cases = [
        AttentionCase("decode", (700, 3, 90), heads=(8, 2), num_splits=4),
        AttentionCase("chunk", (200, 40), (33, 40), head_dim=128),
        AttentionCase("fp8", (500, 30), heads=(8, 1), cache_dtype=E4M3, k_scale="token", v_scale="head"),
        replace(AttentionCase("options", (64, 300), (2, 5)), softcap=2.0, alibi=True, sinks=True, dtype=FP32),
    ]
    alone = [build_attention(case) for case in cases]
    for inputs in alone:
        inputs.call(backend.op("paged_attention"))
    op = getattr(torch.ops, backend.namespace).paged_attention
    failures = []

    def work(index: int) -> None:
        try:
            for _ in range(25):
                inputs = build_attention(cases[index])
                inputs.call(op, num_splits=cases[index].num_splits or 1)
                wanted = build_attention(cases[index])
                wanted.call(op, num_splits=cases[index].num_splits or 1)
                compare.assert_same_bytes(inputs.out.view, wanted.out.view, cases[index].name)
                compare.assert_close(inputs.out.view, alone[index].out.view.double(), cases[index].dtype)
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index % len(cases),)) for index in range(2 * len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
