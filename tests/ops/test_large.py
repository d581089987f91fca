"""Rule 6: more than 2^31 elements, and more rows than a grid dimension holds. Memory is mapped, but hardly touched."""

import pytest
import torch

from pagedkern.testing import compare
from pagedkern.testing.cases import BF16, E4M3

# 131072 blocks of 16 tokens of 8 x 128 elements are 2^31 elements: the last blocks lie beyond.
BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 131072 + 2, 16, 8, 128
EDGE = 131072 * BLOCK_SIZE
SLOTS = (EDGE - 1, EDGE, EDGE + 1, EDGE + BLOCK_SIZE + 3)


@pytest.fixture(scope="module", params=[BF16, E4M3], ids=str)
def caches(request):
    """Beyond 2^31 elements each; torch.empty commits no page that is not touched."""
    size = BLOCKS * BLOCK_SIZE * HEADS * HEAD_DIM * request.param.itemsize
    shape = (BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM)
    return tuple(torch.empty(size, dtype=torch.uint8).view(request.param).view(shape) for _ in range(2))


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8) if cache.dtype == E4M3 else cache.view(torch.int16)


def write(backend, caches, slot_dtype=torch.int64) -> torch.Tensor:
    rows = torch.randint(-8, 9, (len(SLOTS), HEADS, HEAD_DIM)).to(BF16)
    for cache in caches:
        as_bytes(cache)[0].zero_()
        as_bytes(cache)[-3:].zero_()
    backend.op("reshape_and_cache")(rows, -rows, *caches, torch.tensor(SLOTS, dtype=slot_dtype))
    return rows


@pytest.mark.ops("reshape_and_cache")
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_slots_beyond_2_31_elements(backend, caches, slot_dtype):
    rows = write(backend, caches, slot_dtype)
    for cache, sign in zip(caches, (1, -1), strict=True):
        for row, slot in enumerate(SLOTS):
            assert torch.equal(cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE].to(BF16), sign * rows[row])
        assert not as_bytes(cache)[0].any(), "block 0 was written"


@pytest.mark.parametrize("op", ["paged_attention", "gather_cache"])
def test_attention_and_gather_beyond_2_31_elements(backend, caches, op):
    table = torch.tensor([[131072, 131073]], dtype=torch.int32)
    for cache in caches:
        as_bytes(cache)[131072:].zero_()
    slots = torch.arange(20) + EDGE
    rows = torch.randint(-8, 9, (20, HEADS, HEAD_DIM)).to(BF16)
    backend.op("reshape_and_cache")(rows, rows, *caches, slots)
    lens = torch.tensor([20], dtype=torch.int32)
    if op == "paged_attention":
        out = torch.full((1, HEADS, HEAD_DIM), float("nan")).to(BF16)
        backend.op(op)(out, torch.zeros_like(out), *caches, table, lens, None, 1, 20, 1.0)
        compare.assert_close(out, rows.double().mean(0, keepdim=True), BF16)
        return
    key, value = torch.zeros_like(rows), torch.zeros_like(rows)
    backend.op(op)(key, value, *caches, table, lens, torch.tensor([0, 20], dtype=torch.int32))
    assert torch.equal(key, rows) and torch.equal(value, rows)


@pytest.mark.ops("reshape_and_cache", "copy_blocks", "swap_blocks")
def test_copies_beyond_2_31_elements(backend, caches):
    write(backend, caches)
    mapping = torch.tensor([[131072, 0], [131071, 131073]])
    wanted = [as_bytes(cache)[mapping[:, 0]].clone() for cache in caches]
    backend.op("copy_blocks")([caches[0]], [caches[1]], mapping)
    for cache, blocks in zip(caches, wanted, strict=True):
        compare.assert_same_bytes(as_bytes(cache)[mapping[:, 1]], blocks, "copied blocks")
    small = torch.zeros(3, *caches[0].shape[1:], dtype=BF16)
    small = small if caches[0].dtype == BF16 else torch.zeros(small.shape, dtype=torch.uint8).view(E4M3)
    backend.op("swap_blocks")(caches[0], small, torch.tensor([[131072, 2]]))
    compare.assert_same_bytes(as_bytes(small)[2], as_bytes(caches[0])[131072], "swapped out")
    backend.op("swap_blocks")(small, caches[1], torch.tensor([[2, 131073]]))
    compare.assert_same_bytes(as_bytes(caches[1])[131073], as_bytes(small)[2], "swapped in")


@pytest.mark.parametrize(
    "op",
    [
        "reshape_and_cache",
        "reshape_and_cache_dynamic",
        "rope_reshape_and_cache",
        "gather_cache",
        "copy_blocks",
        "paged_attention",
    ],
)
@pytest.mark.one_order
def test_strides_beyond_2_31_elements_between_heads_and_tokens(backend, op):
    """Three heads, tokens or blocks 2^30 elements apart, in one lazily committed allocation."""
    far = 2**30
    bases = [torch.empty(3 * far, dtype=torch.uint8) for _ in range(2)]
    rows = torch.randint(-8, 9, (3, 3, 8)).to(BF16)
    table, lens = torch.tensor([[2]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    for strides in ((32, 8, far), (32, far, 8), (far, 32, 8)):
        caches = [base.as_strided((3, 3, 3, 8), (*strides, 1), 64).zero_().view(E4M3) for base in bases]
        # Slots of the last block, so that every stride is taken.
        slots, key = torch.arange(6, 9), rows.clone()
        if op == "reshape_and_cache_dynamic":
            scales = [torch.empty(2 * far + 64).as_strided((3, 3, 3), (1, 3, far)) for _ in range(2)]
            backend.op(op)(rows, -rows, *caches, *scales, slots)
            for cache, scale, sign in zip(caches, scales, (1, -1), strict=True):
                restored = cache[2].float() * scale[2][..., None]
                torch.testing.assert_close(restored, sign * rows.float(), rtol=2**-4, atol=0.1)
            continue
        if op == "rope_reshape_and_cache":
            turn = (torch.zeros(3, dtype=torch.int64), torch.cat([torch.ones(1, 4), torch.zeros(1, 4)], 1))
            backend.op(op)(rows.clone(), key, -rows, *caches, *turn, slots)
        else:
            backend.op("reshape_and_cache")(rows, -rows, *caches, slots)
        assert torch.equal(caches[0][2].to(BF16), rows) and torch.equal(caches[1][2].to(BF16), -rows)
        assert not caches[0].view(torch.uint8)[:2].any() and not caches[1].view(torch.uint8)[:2].any()
        if op == "copy_blocks":
            backend.op(op)(caches[:1], caches[1:], torch.tensor([[2, 0]]))
            assert torch.equal(caches[0][0].to(BF16), rows) and torch.equal(caches[1][0].to(BF16), -rows)
        elif op == "gather_cache":
            key, value = torch.zeros_like(rows), torch.zeros_like(rows)
            backend.op(op)(key, value, *caches, table, lens, torch.tensor([0, 3], dtype=torch.int32))
            assert torch.equal(key, rows) and torch.equal(value, -rows)
        elif op == "paged_attention":
            out = torch.zeros(1, 3, 8).to(BF16)
            backend.op(op)(out, torch.zeros_like(out), *caches, table, lens, None, 1, 3, 1.0)
            compare.assert_close(out, -rows.double().mean(0, keepdim=True), BF16)


COUNT = 70_000  # sequences, tokens, rows and pairs: more than a grid dimension holds


def many_rows(backend) -> torch.Tensor:
    return torch.randn(COUNT, 1, 8).to(torch.float32 if backend.float32 else BF16)


@pytest.mark.one_order
@pytest.mark.parametrize("op", ["reshape_and_cache", "reshape_and_cache_dynamic", "rope_reshape_and_cache"])
def test_more_tokens_than_a_grid_dimension_holds(backend, op):
    rows = many_rows(backend)
    caches = [torch.zeros(COUNT, 1, 1, 8, dtype=rows.dtype) for _ in range(2)]
    slots = torch.randperm(COUNT)
    if op == "reshape_and_cache_dynamic":
        caches = [cache.to(E4M3) for cache in caches]
        scales = [torch.zeros(COUNT, 1, 1) for _ in range(2)]
        backend.op(op)(rows, rows, *caches, *scales, slots)
        for cache, scale in zip(caches, scales, strict=True):
            restored = cache[slots, 0].float() * scale[slots, 0][..., None]
            torch.testing.assert_close(restored, rows.float(), rtol=2**-4, atol=2**-6)
        return
    if op == "rope_reshape_and_cache":
        turn = (torch.zeros(COUNT, dtype=torch.int64), torch.cat([torch.ones(1, 4), torch.zeros(1, 4)], 1))
        backend.op(op)(rows.clone(), rows.clone(), rows.clone(), *caches, *turn, slots)
    else:
        backend.op(op)(rows, rows, *caches, slots)
    assert all(torch.equal(cache[slots, 0], rows) for cache in caches)


@pytest.mark.one_order
@pytest.mark.parametrize("op", ["paged_attention", "gather_cache"])
def test_more_sequences_than_a_grid_dimension_holds(backend, op):
    rows = many_rows(backend)
    cache, values = rows[:, None].clone(), rows[:, None].clone()
    order = torch.randperm(COUNT)
    table, lens = order.int()[:, None], torch.ones(COUNT, dtype=torch.int32)
    if op == "paged_attention":
        out, lse = torch.zeros_like(rows), torch.zeros(COUNT, 1)
        backend.op(op)(out, torch.zeros_like(rows), cache, values, table, lens, None, 1, 1, 1.0, lse=lse)
        assert torch.equal(out, rows[order]) and not lse.any()
        return
    key, value = torch.zeros_like(rows), torch.zeros_like(rows)
    backend.op(op)(key, value, cache, values, table, lens, torch.arange(COUNT + 1, dtype=torch.int32))
    assert torch.equal(key, rows[order]) and torch.equal(value, rows[order])


@pytest.mark.one_order
@pytest.mark.ops("merge_attention_states")
def test_more_merged_rows_than_a_grid_dimension_holds(backend):
    out, lse = many_rows(backend), torch.zeros(COUNT, 1)
    rows = out.clone()
    nothing = torch.full_like(lse, -float("inf"))
    backend.op("merge_attention_states")(out, None, out, lse, torch.zeros_like(out), nothing)
    assert torch.equal(out, rows)


@pytest.mark.one_order
@pytest.mark.ops("copy_blocks")
def test_more_pairs_than_a_grid_dimension_holds(backend):
    order, target = torch.randperm(COUNT), torch.zeros(2 * COUNT, 1, 1, 8)
    target[:COUNT] = torch.randn(COUNT, 1, 1, 8)
    backend.op("copy_blocks")([target], [target.clone()], torch.stack([torch.arange(COUNT), order + COUNT], 1))
    assert torch.equal(target[order + COUNT], target[:COUNT])
