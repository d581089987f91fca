"""The three cache writers: whole allocations byte for byte against the reference."""

import pytest
import torch

from pagedkern import reference
from pagedkern.testing import compare
from pagedkern.testing.cache_cases import WRITE_CASES
from pagedkern.testing.judge_cache import judge_write

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.cases(WRITE_CASES)
def test_case(backend, case):
    judge_write(backend, case)


def write_one_head(backend, rows: torch.Tensor, cache_dtype: torch.dtype, scale: float | None = None) -> torch.Tensor:
    """rows [n, head_dim] through reshape_and_cache with one head; the bytes stored for the key and value caches."""
    num_tokens, head_dim = rows.shape
    caches = [torch.zeros(num_tokens, 1, 1, head_dim, dtype=torch.uint8).view(cache_dtype) for _ in range(2)]
    scales = [None if scale is None else torch.tensor([scale])] * 2
    backend.op("reshape_and_cache")(rows[:, None], rows[:, None], *caches, torch.arange(num_tokens), *scales)
    key, value = (cache.view(torch.uint8).reshape(num_tokens, head_dim) for cache in caches)
    assert torch.equal(key, value)
    return key


@pytest.mark.ops("reshape_and_cache")
@pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 1.0, 0.5, 0.3, 7.7, 1e-3, 1e-41, 3e-25, 6e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_is_encoded_exactly(backend, dtype, scale, cache_dtype):
    rows = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).reshape(-1, 256)
    expected = reference.encode(rows.float() / (1.0 if scale is None else torch.tensor(scale)), cache_dtype)
    compare.assert_same_bytes(write_one_head(backend, rows, cache_dtype, scale), expected.view(torch.uint8), "bytes")


@pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
def test_float32_near_every_rounding_edge(backend, cache_dtype):
    """The midpoints between neighbours, and the floats just below and above them."""
    table = reference.decode_table(cache_dtype)[:128]
    values = table[table.isfinite()]
    edges = torch.cat([values, (values[1:] + values[:-1]) / 2]).float()
    edges = torch.cat([edges, edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(float("inf")))])
    edges = torch.cat([edges, -edges])
    rows = torch.cat([edges, edges.new_zeros(-edges.numel() % 8)]).reshape(-1, 8)
    expected = reference.encode(rows, cache_dtype).view(torch.uint8)
    compare.assert_same_bytes(write_one_head(backend, rows, cache_dtype), expected, "bytes")


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("op", ["reshape_and_cache", "reshape_and_cache_dynamic"])
def test_of_tokens_with_one_slot_one_wins_whole(backend, op, cache_dtype):
    if op == "reshape_and_cache_dynamic" and cache_dtype is None:
        cache_dtype = torch.float8_e5m2
    num_tokens, kv_heads, head_dim = 600, 8, 128
    # Token i is written as the constant i + 1 in every head of key and value (exact in all formats up to 16).
    token = (torch.arange(num_tokens) % 13 + 1).float()
    rows = token[:, None, None].expand(num_tokens, kv_heads, head_dim).to(torch.bfloat16).contiguous()
    slots = torch.arange(num_tokens) % 3
    dtype = cache_dtype or torch.bfloat16
    caches = [torch.zeros(2, 4, kv_heads, head_dim, dtype=torch.uint8) for _ in range(2)]
    caches = [cache.view(dtype) if dtype.itemsize == 1 else torch.zeros(2, 4, kv_heads, head_dim, dtype=dtype)
              for cache in caches]  # fmt: skip
    scales = [torch.ones(2, 4, kv_heads) for _ in range(2)]
    if op == "reshape_and_cache":
        backend.op(op)(rows, rows, *caches, slots)
    else:
        backend.op(op)(rows, rows, *caches, *scales, slots)
    for slot in range(3):
        found = [cache[0, slot].float() * scale[0, slot][:, None] for cache, scale in zip(caches, scales, strict=True)]
        winner = found[0].flatten()[0].round()
        assert winner in token[slots == slot]
        for part in found:
            torch.testing.assert_close(part, winner.expand_as(part), rtol=1e-5, atol=0)


@pytest.mark.parametrize("op", ["reshape_and_cache", "reshape_and_cache_dynamic", "rope_reshape_and_cache"])
@pytest.mark.parametrize("step", [1, 16], ids=["any_slots", "starts_of_pages"])
def test_of_many_tokens_with_one_slot_one_wins_whole(backend, op, step):
    """Some slots come twice, far apart and side by side, some on and on, some once: with so many tokens that blocks of
    a GPU work on them in teams. Starts of pages, the slots of a decode step, all want one column of a team's table."""
    num_tokens, heads, head_dim = 2600, 2, 16
    token = (torch.arange(num_tokens) % 13 + 1).float()
    rows = token[:, None, None].expand(num_tokens, heads, head_dim).to(torch.bfloat16).contiguous()
    slots = torch.randperm(4096)[:num_tokens]
    slots[2000:2500] = slots[torch.randperm(2000)[:500]]
    slots[1:200:2] = slots[0:200:2]
    slots[torch.randperm(num_tokens)[:300]] = 4095
    slots *= step
    num_slots = 4096 * step
    dtype = torch.float8_e4m3fn if op == "reshape_and_cache_dynamic" else torch.bfloat16
    caches = [torch.zeros(256 * step, 16, heads, head_dim).to(dtype) for _ in range(2)]
    scales = [torch.ones(256 * step, 16, heads) for _ in range(2)]
    if op == "rope_reshape_and_cache":
        turn = (torch.zeros(num_tokens, dtype=torch.int64), torch.cat([torch.ones(1, 8), torch.zeros(1, 8)], 1))
        backend.op(op)(rows.clone(), rows.clone(), rows, *caches, *turn, slots)
    else:
        extra = scales if op == "reshape_and_cache_dynamic" else ()
        backend.op(op)(rows, rows, *caches, *extra, slots)
    stored = [(c.float() * s[..., None]).reshape(num_slots, -1).round() for c, s in zip(caches, scales, strict=True)]
    stored = torch.cat(stored, 1)
    assert torch.equal(stored, stored[:, :1].expand_as(stored)), "a row is a mixture of tokens"
    allowed = torch.zeros(num_slots, 14, dtype=torch.bool)
    allowed[:, 0] = ~torch.isin(torch.arange(num_slots), slots)
    allowed[slots, token.long()] = True
    assert allowed[torch.arange(num_slots), stored[:, 0].long()].all()


def test_rope_is_the_unfused_ops_one_after_another(backend):
    """Fused and unfused agree byte for byte: a second plain write of the rotated key changes nothing."""
    num_tokens, kv_heads, head_dim = 40, 2, 64
    query, key, value = (torch.randn(num_tokens, heads, head_dim).bfloat16() for heads in (6, kv_heads, kv_heads))
    angles = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    caches = [torch.zeros(5, 16, kv_heads, head_dim, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(2)]
    slots, scale = torch.randperm(80)[:num_tokens], torch.tensor([0.03, 0.07])
    positions = torch.arange(num_tokens)
    backend.op("rope_reshape_and_cache")(query, key, value, *caches, positions, cos_sin, slots, False, scale, scale)
    fused = [cache.view(torch.uint8).clone() for cache in caches]
    for cache in caches:
        cache.view(torch.uint8).zero_()
    backend.op("reshape_and_cache")(key, value, *caches, slots, scale, scale)
    for cache, wanted in zip(caches, fused, strict=True):
        compare.assert_same_bytes(cache.view(torch.uint8), wanted, "cache")


def test_dynamic_scale_of_rows_without_finite_elements(backend):
    rows = torch.full((3, 1, 8), float("nan"), dtype=torch.bfloat16)
    rows[1] = float("inf")
    rows[2] = 0.0
    caches = [torch.zeros(1, 4, 1, 8, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(2)]
    scales = [torch.full((1, 4, 1), 9.0) for _ in range(2)]
    backend.op("reshape_and_cache_dynamic")(rows, rows, *caches, *scales, torch.arange(3))
    for cache, scale in zip(caches, scales, strict=True):
        smallest = torch.tensor(1e-10) / torch.tensor(448.0)
        assert torch.equal(scale[0, :, 0], torch.stack([smallest, smallest, smallest, torch.tensor(9.0)]))
        assert cache.view(torch.uint8)[0, :, 0, 0].tolist() == [0x7F, 0x7E, 0x00, 0x00]
