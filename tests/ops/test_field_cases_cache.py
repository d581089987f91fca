"""Faults of cache writes, copies and FP8 that users have reported, each as an exact test named after the fault."""

import math

import pytest
import torch

import pagedkern
from pagedkern import reference
from pagedkern.testing import compare, layouts
from pagedkern.testing.paged import page, positions_as_values, zero_keys

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("slot", [4 * 16, 4 * 16 + 3, 2**31 - 1])
@pytest.mark.parametrize("op", ["reshape_and_cache", "reshape_and_cache_dynamic", "rope_reshape_and_cache"])
def test_slot_past_the_cache_corrupts_a_neighbour(backend, op, slot, slot_dtype):
    """Raises before anything is written where values are checked, skips the token elsewhere."""
    dynamic = op == "reshape_and_cache_dynamic"
    pair = layouts.cache_pair("NHD", (4, 16, 2, 64), E4M3 if dynamic else torch.bfloat16, "sentinel")
    before = pair.clone()
    rows = torch.ones(3, 2, 64).bfloat16()
    query, slots = torch.ones(3, 2, 64).bfloat16(), torch.tensor([0, slot, 1], dtype=slot_dtype)
    scales = [torch.ones(4, 16, 2) for _ in range(2)]
    turn = (torch.zeros(3, dtype=torch.int64), torch.ones(1, 64))
    arguments = {
        "reshape_and_cache": (rows, rows, pair.key, pair.value, slots),
        "reshape_and_cache_dynamic": (rows, rows, pair.key, pair.value, *scales, slots),
        "rope_reshape_and_cache": (query, rows, rows.clone(), pair.key, pair.value, *turn, slots),
    }[op]
    if not backend.checks_values:
        backend.op(op)(*arguments)
        for cache in (pair.key, pair.value, before.key, before.value):
            cache.view(torch.uint8 if dynamic else torch.int16)[0, :2] = 0
    else:
        with pytest.raises(RuntimeError, match="slot"):
            backend.op(op)(*arguments)
        assert (rows == 1).all() and (query == 1).all()
    for got, wanted in zip(pair.buffers, before.buffers, strict=True):
        compare.assert_same_bytes(got.bytes(), wanted.bytes(), "allocation")


@pytest.mark.ops("reshape_and_cache")
@pytest.mark.parametrize("where", ["key", "cache", "both"])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3], ids=str)
def test_vector_stores_to_misaligned_rows(backend, cache_dtype, where):
    """head_dim 40 with an odd offset of one element, slots 0 to 40."""
    row_layout = "contiguous" if where == "cache" else "odd_offset"
    cache_layout = "NHD" if where == "key" else "odd_offset"
    rows = layouts.rows(row_layout, (41, 3, 40), torch.bfloat16, "nan").view
    rows.copy_(torch.randn(rows.shape))
    pair = layouts.cache_pair(cache_layout, (3, 16, 3, 40), cache_dtype, "sentinel")
    expected = pair.clone()
    reference.reshape_and_cache(rows, -rows, expected.key, expected.value, torch.arange(41))
    backend.op("reshape_and_cache")(rows, -rows, pair.key, pair.value, torch.arange(41))
    for got, wanted in zip(pair.buffers, expected.buffers, strict=True):
        compare.assert_same_bytes(got.bytes(), wanted.bytes(), "allocation")


@pytest.mark.ops("swap_blocks")
def test_swap_mapping_is_not_checked(backend):
    source, target = torch.randn(4, 2, 1, 8), torch.zeros(6, 2, 1, 8)
    for pair in ((0, 6), (4, 0), (-1, 0), (0, -1)):
        with pytest.raises(RuntimeError, match="block_mapping"):
            backend.op("swap_blocks")(source, target, torch.tensor([(1, 1), pair]))
    if backend.name != "reference":
        for wrong in (torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64)):
            with pytest.raises(RuntimeError, match="block_mapping"):
                backend.op("swap_blocks")(source, target, wrong)
    assert not target.any()


@pytest.mark.ops("swap_blocks")
def test_sixty_thousand_swapped_blocks(backend):
    source, target = torch.randn(60000, 1, 1, 8), torch.zeros(60000, 1, 1, 8)
    order = torch.randperm(60000)
    backend.op("swap_blocks")(source, target, torch.stack([torch.arange(60000), order], 1))
    assert torch.equal(target[order], source)


@pytest.mark.parametrize("q_len", [1, 4])
def test_per_head_scales_are_dropped(backend, q_len):
    """Stored values differ by head so that the dequantised ones agree: all heads must."""
    k_scale, v_scale = torch.tensor([0.25, 0.5, 1, 2]), torch.tensor([1.0, 2, 4, 8])
    keys, values = (torch.randint(-8, 9, (40, 1, 64)).float().expand(40, 4, 64) for _ in range(2))
    batch = page([keys], [values], dtype=E4M3, k_scale=k_scale, v_scale=v_scale)
    query = torch.randn(q_len, 1, 64).bfloat16().expand(q_len, 8, 64)
    out, lse = batch.attend(backend, query, [q_len], scale=0.05)
    expected, expected_lse = batch.attend(None, query, [q_len], scale=0.05)
    compare.assert_close(out, expected, torch.bfloat16)
    compare.assert_lse_close(lse, expected_lse, fp8=True)
    for head in range(8):
        # Powers of two scale exactly, so heads agree to the last bit.
        assert torch.equal(out[:, head], out[:, 0]) and torch.equal(lse[:, head], lse[:, 0])


@pytest.mark.ops("reshape_and_cache")
def test_scales_of_the_wrong_shape_are_accepted(backend):
    rows = torch.ones(2, 4, 8).bfloat16()
    caches = [torch.zeros(3, 2, 4, 8, dtype=torch.uint8).view(E4M3) for _ in range(2)]
    wrong = [
        torch.ones(3),
        torch.ones(5),
        torch.ones(3, 4),
        torch.ones(3, 2, 1),
        torch.ones(4).double(),
        torch.ones(8)[::2],
    ]
    if backend.name == "reference":
        return  # the reference checks no shapes
    for scale in wrong:
        for name in ("k_scale", "v_scale"):
            with pytest.raises(RuntimeError, match=name):
                backend.op("reshape_and_cache")(rows, rows, *caches, torch.arange(2), **{name: scale})
    assert not any(cache.view(torch.uint8).any() for cache in caches)


EDGES = [448, 464, 465, 1e5, math.inf, -math.inf, math.nan, -0.0, 0.001, 57344, 61440, -465]


@pytest.mark.ops("reshape_and_cache")
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize(
    "cache_dtype,wanted",
    [
        (E4M3, {1.0: [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x80, 0x01, 0x7E, 0x7E, 0xFE],
                0.5: [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x80, 0x01, 0x7E, 0x7E, 0xFE]}),
        (torch.float8_e5m2, {1.0: [0x5F, 0x5F, 0x5F, 0x7B, 0x7B, 0xFB, 0x7F, 0x80, 0x14, 0x7B, 0x7B, 0xDF],
                             0.5: [0x63, 0x63, 0x63, 0x7B, 0x7B, 0xFB, 0x7F, 0x80, 0x18, 0x7B, 0x7B, 0xE3]}),
    ],
    ids=["e4m3", "e5m2"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saturation_gives_nan_at_the_edge(backend, dtype, cache_dtype, wanted, scale):
    rows = torch.tensor([*EDGES, 0, 0, 0, 0], dtype=dtype).reshape(1, 1, 16)
    caches = [torch.zeros(1, 1, 1, 16, dtype=torch.uint8).view(cache_dtype) for _ in range(2)]
    scales = [torch.tensor([scale])] * 2
    backend.op("reshape_and_cache")(rows, rows, *caches, torch.tensor([0]), *scales)
    for cache in caches:
        assert [f"{b:02x}" for b in cache.view(torch.uint8).flatten().tolist()[:12]] == [
            f"{b:02x}" for b in wanted[scale]
        ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
def test_fp8_bytes_are_misread_by_attention(backend, cache_dtype, dtype):
    """One key per sequence, so that out is the value itself and lse the score: all 256 bytes as V, then as K."""
    every_byte = torch.arange(256, dtype=torch.uint8)
    table = reference.decode_table(cache_dtype)
    zero = torch.zeros(256, 1, 1, 8, dtype=torch.uint8)
    bytes_first = zero.clone()
    bytes_first[:, 0, 0, 0] = every_byte
    blocks = torch.arange(256, dtype=torch.int32)[:, None]
    ones = torch.ones(256, dtype=torch.int32)
    query = torch.zeros(256, 1, 8, dtype=dtype)
    query[:, 0, 0] = 1
    for key, value in ((zero, bytes_first), (bytes_first, zero)):
        out, lse = torch.zeros_like(query), torch.zeros(256, 1)
        caches = (key.view(cache_dtype), value.view(cache_dtype))
        backend.op("paged_attention")(out, query, *caches, blocks, ones, None, 1, 1, 0.5, lse=lse)
        if key is zero:
            torch.testing.assert_close(out[:, 0, 0], table.to(dtype), rtol=0, atol=0, equal_nan=True)
        else:
            # +inf is a score no softmax survives; -inf and NaN have no single right answer either.
            finite = table.isfinite()
            torch.testing.assert_close(lse[finite, 0].double(), 0.5 * table[finite], rtol=1e-6, atol=0)
            assert lse[table.isnan(), 0].isnan().all()


@pytest.mark.ops("reshape_and_cache")
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scale_that_is_no_scale_is_accepted(backend, name, value):
    rows = torch.ones(2, 4, 8).bfloat16()
    caches = [torch.zeros(3, 2, 4, 8, dtype=torch.uint8).view(E4M3) for _ in range(2)]
    for scale in (torch.tensor([value]), torch.tensor([1.0, 1.0, value, 1.0])):
        with pagedkern.check_mode(True), pytest.raises(RuntimeError, match=name):
            backend.op("reshape_and_cache")(rows, rows, *caches, torch.arange(2), **{name: scale})
    assert not any(cache.view(torch.uint8).any() for cache in caches)


def test_scales_are_read_at_every_call(backend):
    scale = torch.tensor([1.0])
    batch = page([zero_keys(8)], [positions_as_values(8)], dtype=E4M3, k_scale=scale, v_scale=scale)
    query = torch.randn(1, 1, 64).bfloat16()
    means = []
    for value in (1.0, 0.5, 2.0):
        scale.fill_(value)
        means.append(batch.attend(backend, query)[0][0, 0, 0].item())
    assert means == [3.5, 1.75, 7.0]
