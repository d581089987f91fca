"""merge_attention_states: against the reference, and against attention over the whole."""

from dataclasses import replace

import pytest
import torch

from pagedkern.testing import compare
from pagedkern.testing.cache_cases import MERGE_CASES
from pagedkern.testing.cases import AttentionCase
from pagedkern.testing.inputs import build_attention
from pagedkern.testing.judge_cache import judge_merge

INF = float("inf")


@pytest.mark.cases(MERGE_CASES)
def test_case(backend, case):
    judge_merge(backend, case)


@pytest.mark.parametrize("empty_lse", [-INF, INF])
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_merge_with_an_empty_part_is_the_other_bit_for_bit(backend, dtype, side, empty_lse):
    part, part_lse = torch.randn(50, 3, 72).to(dtype), torch.randn(50, 3) * 20
    empty, gone = torch.full_like(part, float("nan")), torch.full_like(part_lse, empty_lse)
    out, lse = torch.zeros_like(part), torch.zeros_like(part_lse)
    parts = (part, part_lse, empty, gone) if side == "a" else (empty, gone, part, part_lse)
    backend.op("merge_attention_states")(out, lse, *parts)
    compare.assert_same_bytes(out, part, "out")
    compare.assert_same_bytes(lse, part_lse, "lse")


@pytest.mark.parametrize("lse_a", [-INF, INF])
@pytest.mark.parametrize("lse_b", [-INF, INF])
def test_merge_of_nothing_is_nothing(backend, lse_a, lse_b):
    nan = torch.full((2, 3, 16), float("nan"))
    out, lse = torch.ones(2, 3, 16), torch.ones(2, 3)
    backend.op("merge_attention_states")(out, lse, nan, torch.full((2, 3), lse_a), nan, torch.full((2, 3), lse_b))
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, torch.full_like(lse, -INF))


def test_far_apart_parts_do_not_overflow(backend):
    a, b = torch.ones(1, 2, 8), torch.full((1, 2, 8), 3.0)
    lse_a, lse_b = torch.tensor([[5e4, -5e4]]), torch.tensor([[-5e4, 5e4]])
    out, lse = torch.zeros(1, 2, 8), torch.zeros(1, 2)
    backend.op("merge_attention_states")(out, lse, a, lse_a, b, lse_b)
    assert out[0, :, 0].tolist() == [1.0, 3.0] and lse.tolist() == [[5e4, 5e4]]


@pytest.mark.parametrize("cut", [0, 1, 16, 30, 45])
def test_attention_over_two_parts_merges_to_attention_over_the_whole(backend, cut):
    case = AttentionCase("whole", seq_lens=(45,), dtype=torch.float32, block_size=1, heads=(6, 2), head_dim=32)
    whole = build_attention(case)
    whole.call(backend.op("paged_attention"))
    parts = []
    for first, last in ((0, cut), (cut, 45)):
        part = build_attention(case)
        part.case = replace(case, seq_lens=(last - first,))
        part.block_table = part.block_table[:, first:].contiguous()
        part.seq_lens = torch.tensor([last - first], dtype=torch.int32)
        part.call(backend.op("paged_attention"))
        parts += [part.out.view, part.lse.view]
    out, lse = torch.zeros(1, 6, 32), torch.zeros(1, 6)
    backend.op("merge_attention_states")(out, lse, *parts)
    compare.assert_close(out, whole.out.view.double(), torch.float32)
    compare.assert_lse_close(lse, whole.lse.view.double())
