"""Numbers of any size: scores, scales, options and queries far from 1, and small weights that have all the say."""

import math

import pytest
import torch

from pagedkern.testing import compare
from pagedkern.testing.cases import BF16, E4M3, FP16
from pagedkern.testing.paged import page

pytestmark = [pytest.mark.ops("paged_attention"), pytest.mark.one_order]


def assert_right(backend, batch, query, num_splits=0, by_row=False, **options):
    """Out and lse within rule 13 of the reference; by_row: each row of out by itself."""
    q_lens, fp8 = [query.size(0)], batch.key_cache.dtype.itemsize == 1
    out, lse = batch.attend(backend, query, q_lens, num_splits=num_splits, **options)
    expected, expected_lse = batch.attend(None, query, q_lens, **options)
    for got, wanted in zip(out, expected, strict=True) if by_row else [(out, expected)]:
        compare.assert_close(got, wanted, query.dtype)
    compare.assert_lse_close(lse, expected_lse, fp8=fp8)


@pytest.mark.parametrize("scale", [0.1, 7e5, 6e6, 5e7, 1.1e8, 1e12, 1e30])
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize(("dtype", "cache_dtype"), [(BF16, None), (FP16, None), (BF16, E4M3)], ids=str)
def test_equal_scores_of_any_size_weigh_the_same(backend, dtype, cache_dtype, rows, scale):
    """Every third of 300 keys is the same and above all others: the mean of their values, whatever the splits."""
    query = torch.ones(rows, 2, 64, dtype=dtype)
    keys, values = 0.7 * torch.rand(300, 1, 64), torch.randn(300, 1, 64)
    keys[::3] = 0.8125
    batch = page([keys], [values], dtype=cache_dtype or dtype)
    for num_splits in (0, 1, 3):
        assert_right(backend, batch, query, num_splits, scale=scale, causal=False)


@pytest.mark.parametrize("heads", [4, 71])
@pytest.mark.parametrize("q_len", [1, 20])
@pytest.mark.parametrize(("dtype", "cache_dtype"), [(BF16, None), (FP16, None), (BF16, E4M3), (FP16, E4M3)], ids=str)
def test_little_weight_beside_a_sink(backend, dtype, cache_dtype, q_len, heads):
    """Key 0 has nearly all weight, and value 0: out is what the other keys' small weights make of their values."""
    for share in (0.9, 0.9995) if dtype == FP16 else (0.9, 0.9995, 0.99999):  # float16 cannot hold what is left
        gap = math.log(share / (1 - share) * 511)
        query = torch.randn(q_len, heads, 128)
        query[..., 0] = 8.0
        keys, values = 0.3 * torch.randn(512, 1, 128), 40 * torch.randn(512, 1, 128)
        keys[..., 0], keys[0], values[0] = 0.0, 0.0, 0.0
        keys[0, 0, 0] = 16.0
        batch = page([keys], [values], dtype=cache_dtype or dtype)
        assert_right(backend, batch, query.to(dtype), scale=gap / 128, causal=False)


@pytest.mark.parametrize("ratio", [1e-2, 1e-6, 1e-10])
@pytest.mark.parametrize("q_len", [1, 20])
def test_value_scales_of_any_size_beside_each_other(backend, q_len, ratio):
    """The last token's scale is larger than all others: rows that do not see it must not feel it, the last does."""
    scale = torch.full((6, 16, 1), ratio)
    batch = page([torch.randn(64, 1, 64)], [ratio * torch.randn(64, 1, 64)], dtype=E4M3, v_scale=scale)
    scale[int(batch.block_table[0, 3]), 15] = 1.0
    query = torch.randn(q_len, 2, 64).to(BF16)
    for size in (0.125, 100.0, 1e3, 1e8) if ratio > 1e-3 else (0.125, 100.0, 1e3):
        assert_right(backend, batch, query, scale=size, by_row=True)


@pytest.mark.parametrize("q_len", [1, 20])
@pytest.mark.parametrize(("size", "k_scale", "scale"), [(1e-38, 2e-7, 0.088), (1.0, 1e-30, 1e-30), (1.0, 1e36, 1e-37)])
def test_factors_of_any_size(backend, size, k_scale, scale, q_len):
    """Whose product, or a part of it, is less than float32 holds: all keys weigh the same, and masked ones nothing."""
    keys, values = k_scale * torch.randn(100, 1, 64), torch.randn(100, 1, 64)
    batch = page([keys], [values], dtype=E4M3, k_scale=torch.tensor([k_scale]))
    query = (size * torch.randn(q_len, 2, 64)).to(BF16)
    assert_right(backend, batch, query, scale=scale)


@pytest.mark.parametrize("options", [{"softcap": 1e5}, {"softcap": 1e7}, {"sinks": 1e8}, {"sinks": 4e10},
                                     {"num_splits": 2**31 - 1}], ids=str)  # fmt: skip
@pytest.mark.parametrize("q_len", [1, 20])
def test_options_of_any_size(backend, q_len, options):
    batch = page([torch.randn(300, 1, 64)], [torch.randn(300, 1, 64)], dtype=BF16)
    query = torch.randn(q_len, 8, 64).to(BF16)
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = options["sinks"] * torch.rand(8)
    for num_splits in {1, 3} if "num_splits" not in options else {options.pop("num_splits")}:
        assert_right(backend, batch, query, num_splits, scale=0.125, **options)


@pytest.mark.parametrize("q_len", [1, 20])
@pytest.mark.parametrize("power", [-100, -20, 20, 100])
def test_queries_of_any_size_over_fp8_keys(backend, power, q_len):
    """bfloat16 has a range that what FP8 is multiplied in need not have; each row has a size of its own."""
    keys, values = 0.5 * torch.randn(150, 1, 64), torch.randn(150, 1, 64)
    batch = page([keys], [values], dtype=E4M3)
    query = torch.randn(q_len, 2, 64) * 2.0 ** (power + torch.arange(q_len) % 4)[:, None, None]
    query, scale = query.to(BF16), 0.125 * 2.0**-power
    assert_right(backend, batch, query, scale=scale)
