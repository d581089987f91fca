"""Attention faults that users of such libraries have reported, each as an exact test named after the fault.

K = 0 makes every live key weigh the same: with V[j] = j the output is the mean of the live positions.
"""

import math

import pytest
import torch

from pagedkern.testing import compare
from pagedkern.testing.cases import BLOCK_SIZES, AttentionCase
from pagedkern.testing.judge import judge_attention
from pagedkern.testing.paged import page, positions_as_values, zero_keys

pytestmark = [pytest.mark.ops("paged_attention", "reshape_and_cache"), pytest.mark.one_order]
BF16_ULP = 2.0**-8
RATIOS = [(28, 4), (24, 4), (40, 8), (48, 4), (24, 1), (64, 4), (71, 1), (13, 1), (3, 3)]


def finest(backend) -> torch.dtype:
    return torch.float32 if backend.float32 else torch.bfloat16


def assert_means(out: torch.Tensor, means, tolerance: float = BF16_ULP) -> None:
    """Every element of row i of out is means[i]."""
    expected = torch.as_tensor(means).double()[:, None, None].expand(out.shape)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("seq_len", [64, 129, 4096])
def test_full_window_is_not_the_causal_mask(backend, seq_len):
    keys, values = torch.randn(2, seq_len, 1, 64)
    q_len = seq_len if backend.order is None else min(seq_len, 300)
    query = torch.randn(q_len, 2, 64).bfloat16()
    random = page([keys], [values], dtype=torch.bfloat16)
    means = page([zero_keys(seq_len)], [positions_as_values(seq_len)], dtype=torch.bfloat16)
    for batch in (random, means):
        plain, windowed = (
            batch.attend(backend, query, [q_len], scale=0.125, window_left=left) for left in (-1, seq_len - 1)
        )
        compare.assert_same_bytes(windowed[0], plain[0], "out")
        compare.assert_same_bytes(windowed[1], plain[1], "lse")
    expected = (torch.arange(seq_len) % 128).double().cumsum(0) / torch.arange(1, seq_len + 1)
    assert_means(plain[0], expected[-q_len:])


def test_stale_block_table_entries_are_dereferenced(backend):
    lengths = [1, 17, 100]
    means = [0.0, 8.0, 49.5]
    values = [positions_as_values(n) for n in lengths]
    batch = page([zero_keys(n) for n in lengths], values, dtype=torch.bfloat16, table_slack=0)
    nan_block = [b for b in range(batch.key_cache.size(0)) if batch.key_cache[b].isnan().all()][0]
    live = [1, 2, 7]
    query = torch.randn(3, 2, 64).bfloat16()
    for stale in (-1, 1 << 30, nan_block, 2147480000):
        for row, count in enumerate(live):
            batch.block_table[row, count:] = stale
        # The last row is exactly full and ends where its allocation ends.
        assert batch.block_table.size(1) == live[-1]
        assert_means(batch.attend(backend, query)[0], means)
        sliced = torch.full((3, 20), stale, dtype=torch.int32)
        sliced[:, 4:11] = batch.block_table
        whole, batch.block_table = batch.block_table, sliced[:, 4:11]
        assert_means(batch.attend(backend, query)[0], means)
        batch.block_table = whole


@pytest.mark.parametrize("heads,kv_heads", RATIOS)
@pytest.mark.parametrize("q_len", [1, 3])
def test_gqa_ratio_outside_the_common_ones(backend, heads, kv_heads, q_len):
    values = torch.arange(kv_heads).float()[None, :, None].expand(20, kv_heads, 64)
    batch = page([zero_keys(20, kv_heads)], [values], dtype=torch.bfloat16)
    out, _ = batch.attend(backend, torch.randn(q_len, heads, 64).bfloat16(), [q_len])
    expected = (torch.arange(heads) // (heads // kv_heads)).double()[None, :, None].expand(out.shape)
    assert torch.equal(out.double(), expected)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_page_size_changes_the_answer(backend, block_size):
    for seq_len in {block_size - 1, block_size, block_size + 1, 8864} - {0}:
        keys, values = torch.randn(2, seq_len, 1, 32, generator=torch.Generator().manual_seed(seq_len))
        dtype = finest(backend)
        query = torch.randn(1, 2, 32).to(dtype)
        usual = page([keys], [values], block_size=16, dtype=dtype)
        expected, expected_lse = usual.attend(None, query, scale=0.2)
        out, lse = page([keys], [values], block_size=block_size, dtype=dtype).attend(backend, query, scale=0.2)
        compare.assert_close(out, expected, dtype)
        compare.assert_lse_close(lse, expected_lse)


def test_query_view_of_a_fused_projection_is_misread(backend):
    heads, kv_heads, head_dim, lengths = 6, 2, 64, [5, 33, 70]
    keys = [torch.randn(n, kv_heads, head_dim) for n in lengths]
    values = [torch.randn(n, kv_heads, head_dim) for n in lengths]
    batch = page(keys, values, dtype=torch.bfloat16)
    fused = torch.full((3, (heads + 2 * kv_heads) * head_dim), float("nan")).bfloat16()
    # The query may be the first, the middle or the last part; the rest stays NaN.
    for first in (0, kv_heads * head_dim, 2 * kv_heads * head_dim):
        query = fused[:, first : first + heads * head_dim].view(3, heads, head_dim)
        query.copy_(torch.randn(query.shape))
        expected, _ = batch.attend(None, query, scale=0.125)
        compare.assert_close(batch.attend(backend, query, scale=0.125)[0], expected, torch.bfloat16)
        fused.fill_(float("nan"))
    permuted = torch.randn(heads, 3, head_dim).bfloat16().transpose(0, 1)
    every_second = torch.randn(3, 2 * heads, head_dim).bfloat16()[:, ::2]
    for query in (permuted, every_second):
        expected, _ = batch.attend(None, query, scale=0.125)
        compare.assert_close(batch.attend(backend, query, scale=0.125)[0], expected, torch.bfloat16)


@pytest.mark.parametrize("out_layout", ["contiguous", "fused", "head_major", "odd_stride"])
@pytest.mark.parametrize("num_splits", [4, 9])
def test_split_combine_writes_out_with_the_wrong_stride(backend, num_splits, out_layout):
    case = AttentionCase("splits", seq_lens=(300, 4, 129), num_splits=num_splits, out_layout=out_layout)
    judge_attention(backend, case)


@pytest.mark.parametrize("num_splits", [1, 2, 7, 16, 32, 128])
@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 4096])
def test_num_splits_changes_the_answer(backend, seq_len, num_splits):
    batch = page([zero_keys(seq_len, 8, 128)], [positions_as_values(seq_len, 8, 128)], dtype=torch.bfloat16)
    out, lse = batch.attend(backend, torch.randn(1, 16, 128).bfloat16(), num_splits=num_splits)
    assert_means(out, [(torch.arange(seq_len) % 128).double().mean()])
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(seq_len)), rtol=2e-6, atol=1e-5)


def test_automatic_splits_of_random_lengths_give_nan(backend):
    lengths = torch.randint(1, 1500, (200,)).tolist()
    values = [positions_as_values(n, 2, 32) for n in lengths]
    batch = page([zero_keys(n, 2, 32) for n in lengths], values, dtype=torch.bfloat16)
    out, lse = batch.attend(backend, torch.randn(200, 4, 32).bfloat16())
    assert_means(out, [(torch.arange(n) % 128).double().mean() for n in lengths])
    expected = torch.tensor(lengths).float().log()[:, None].expand(lse.shape)
    torch.testing.assert_close(lse, expected, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("num_splits", [0, 8])
@pytest.mark.parametrize("batch,max_seqlen_k", [(512, 700), (1, 131072)])
def test_split_workspace_is_too_small(backend, batch, max_seqlen_k, num_splits):
    """Exactly the promised bytes are enough (the judge guards their end); one less is refused before a write."""
    sizes = (batch, 64, 4, 256, batch, 1, max_seqlen_k, num_splits)
    needed = backend.op("paged_attention_workspace_size")(*sizes)
    lengths = tuple(1 + i % 3 for i in range(batch))
    case = AttentionCase(
        "workspace", lengths, heads=(64, 4), head_dim=256, workspace=True, num_splits=num_splits,
        bound_slack=max_seqlen_k - max(lengths),
    )  # fmt: skip
    if batch == 1:
        judge_attention(backend, case)
    if needed == 0:
        return
    keys = [zero_keys(n, 4, 256) for n in lengths]
    paged = page(keys, keys, dtype=torch.bfloat16)
    query = torch.zeros(batch, 64, 256).bfloat16()
    out = torch.full_like(query, 7.0)
    with pytest.raises(RuntimeError, match="workspace"):
        backend.op("paged_attention")(
            out, query, paged.key_cache, paged.value_cache, paged.block_table, paged.seq_lens, None, 1, max_seqlen_k,
            1.0, num_splits=num_splits, workspace=torch.zeros(needed - 1, dtype=torch.uint8),
        )  # fmt: skip
    assert (out == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_alibi_distance_is_off_by_one(backend, dtype):
    one_hot = torch.eye(8)[:3, None]
    batch = page([zero_keys(3, 1, 8)], [one_hot], dtype=dtype)
    slopes = torch.tensor([1.0, 0.5])
    out, lse = batch.attend(backend, torch.ones(1, 2, 8, dtype=dtype), alibi_slopes=slopes)
    weights = torch.tensor([0.0900, 0.2447, 0.6652])
    torch.testing.assert_close(
        out[0, 0, :3].float(), weights, rtol=BF16_ULP if dtype == torch.bfloat16 else 0, atol=5e-5
    )
    torch.testing.assert_close(lse[0, 0].item(), 0.4076, rtol=0, atol=5e-5)
    torch.testing.assert_close(lse[0, 1].item(), math.log(1 + math.exp(-0.5) + math.exp(-1)), rtol=0, atol=1e-5)
    # Prefill: each row has its own position.
    out, lse = batch.attend(backend, torch.ones(2, 2, 8, dtype=dtype), [2], alibi_slopes=slopes)
    torch.testing.assert_close(lse[:, 0], torch.tensor([math.log(1 + math.exp(-1)), 0.4076]), rtol=0, atol=5e-5)


def test_alibi_slopes_of_another_dtype_are_misread(backend):
    batch = page([zero_keys(3, 1, 8)], [zero_keys(3, 1, 8)], dtype=torch.bfloat16)
    if backend.name == "reference":
        return  # the reference checks no dtypes
    with pytest.raises(RuntimeError, match="alibi_slopes"):
        batch.attend(backend, torch.ones(1, 2, 8).bfloat16(), alibi_slopes=torch.tensor([1.0, 0.5]).bfloat16())


def capped_batch(dtype: torch.dtype, k_scale=None, filler: int = 0):
    """Two keys of logits 60 and 30 behind `filler` keys that only a window hides; V is one-hot."""
    keys, values = torch.zeros(filler + 2, 1, 64), torch.zeros(filler + 2, 1, 64)
    keys[:filler, 0, 0] = 100 * 8
    keys[-2, 0, 0], keys[-1, 0, 0] = 60 * 8, 30 * 8
    values[:filler] = 1000.0 if dtype.itemsize > 1 else 400.0
    values[-2, 0, 0], values[-1, 0, 1] = 1, 1
    return page([keys], [values], dtype=dtype, k_scale=k_scale)


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("window", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_softcap_is_dropped_or_out_of_order(backend, dtype, window, q_len):
    fp8 = dtype.itemsize == 1
    # 480 and 240 are exact in every format with a scale of 2: 240 and 120.
    batch = capped_batch(dtype, torch.tensor([2.0]) if fp8 else None, filler=0 if window < 0 else 30)
    query = torch.zeros(q_len, 1, 64, dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16)
    query[:, 0, 0] = 1
    out, _ = batch.attend(backend, query, [q_len], scale=1 / 8, softcap=30.0, window_left=window)
    tolerance = 5e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out[-1, 0, :2].float(), torch.tensor([0.99770, 0.00230]), rtol=tolerance, atol=5e-6)


def test_softcap_of_huge_logits_is_nan(backend):
    keys = torch.zeros(40, 1, 64)
    keys[::2, 0, 0], keys[1::2, 0, 0] = 8192, -8192
    dtype = finest(backend)
    query = torch.zeros(1, 1, 64, dtype=dtype)
    query[0, 0, 0] = 1
    batch = page([keys], [positions_as_values(40)], dtype=dtype)
    out, lse = batch.attend(backend, query, softcap=50.0)
    assert_means(out, [19.0], 1e-6)
    torch.testing.assert_close(lse.item(), 50 + math.log(20), rtol=1e-6, atol=0)
    out, lse = batch.attend(backend, query)
    assert_means(out, [19.0], 1e-6)
    torch.testing.assert_close(lse.item(), 8192 + math.log(20), rtol=2e-6, atol=1e-3)


def test_ragged_lengths_take_the_keys_offset_from_the_queries(backend):
    batch = page([zero_keys(40), zero_keys(9)], [positions_as_values(40), positions_as_values(9)], dtype=torch.bfloat16)
    out, _ = batch.attend(backend, torch.randn(8, 2, 64).bfloat16(), [3, 5])
    assert_means(out, [18.5, 19.0, 19.5, 2.0, 2.5, 3.0, 3.5, 4.0])


def test_sixteen_thousand_tokens_in_one_call(backend):
    values = [positions_as_values(2048, 1, 16) for _ in range(8)]
    batch = page([zero_keys(2048, 1, 16)] * 8, values, block_size=64, dtype=torch.bfloat16)
    out, _ = batch.attend(backend, torch.randn(8 * 2048, 1, 16).bfloat16(), [2048] * 8)
    means = (torch.arange(2048) % 128).double().cumsum(0) / torch.arange(1, 2049)
    assert_means(out, means.repeat(8))


@pytest.mark.parametrize("seq_len,mean", [(16, 7.5), (32, 15.5)])
def test_surplus_page_at_a_page_boundary_counts_as_keys(backend, seq_len, mean):
    batch = page([zero_keys(seq_len)], [positions_as_values(seq_len)], dtype=torch.bfloat16)
    used = batch.block_table[0, : seq_len // 16].tolist()
    batch.block_table[0, seq_len // 16] = next(b for b in range(batch.key_cache.size(0)) if b not in used)
    out, _ = batch.attend(backend, torch.randn(1, 2, 64).bfloat16())
    assert torch.equal(out.double(), torch.full((1, 2, 64), mean, dtype=torch.float64))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("chunks", [[48], [16, 32], [47, 1], [1] * 48])
def test_chunked_prefill_reads_the_cached_prefix_wrongly(backend, chunks, fp8):
    """Written and attended chunk by chunk as an engine does it, then one decode step."""
    torch.manual_seed(1)
    heads, kv_heads, head_dim = 4, 2, 64
    query = torch.randn(49, heads, head_dim).bfloat16()
    keys, values = torch.randn(2, 49, kv_heads, head_dim).bfloat16()
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    scales = (torch.tensor([0.02, 0.05]), torch.tensor([0.03])) if fp8 else (None, None)
    filled = page([keys], [values], dtype=dtype, k_scale=scales[0], v_scale=scales[1])
    expected, expected_lse = filled.attend(None, query, [49], scale=0.125)
    batch = page(
        [zero_keys(49, kv_heads)], [zero_keys(49, kv_heads)], dtype=dtype, k_scale=scales[0], v_scale=scales[1]
    )
    for cache in (batch.key_cache, batch.value_cache):
        cache.view(torch.uint8).fill_(0xFF)
    start = 0
    for chunk in [*chunks, 1]:
        rows = slice(start, start + chunk)
        position = torch.arange(start, start + chunk)
        slots = batch.block_table[0].long()[position // 16] * 16 + position % 16
        caches = (batch.key_cache, batch.value_cache)
        backend.op("reshape_and_cache")(keys[rows], values[rows], *caches, slots, *scales)
        batch.seq_lens.fill_(start + chunk)
        out, lse = batch.attend(backend, query[rows], [chunk], scale=0.125)
        compare.assert_close(out, expected[rows], torch.bfloat16)
        compare.assert_lse_close(lse, expected_lse[rows], fp8)
        start += chunk
