"""The reference itself: against torch in float64 where torch has the same function, and against known values."""

import math

import pytest
import torch

from pagedkern import reference
from pagedkern.testing.paged import page, positions_as_values, zero_keys

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("q_len,seq_len", [(1, 40), (7, 40), (40, 40)])
def test_plain_attention_is_torchs(q_len, seq_len, heads, kv_heads, causal):
    keys, values = torch.randn(2, seq_len, kv_heads, 32)
    query = torch.randn(q_len, heads, 32)
    out, lse = page([keys], [values]).attend(None, query, [q_len], scale=0.2, causal=causal)
    position = torch.arange(seq_len)
    mask = position[None] <= position[-q_len:, None] if causal else torch.ones(q_len, seq_len, dtype=torch.bool)
    q, k, v = (x.double().transpose(0, 1)[None] for x in (query, keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.2, enable_gqa=True)[0]
    torch.testing.assert_close(out, expected.transpose(0, 1), rtol=1e-12, atol=1e-12)
    scores = 0.2 * q[0] @ k[0].repeat_interleave(heads // kv_heads, 0).transpose(1, 2)
    expected_lse = scores.masked_fill(~mask, -math.inf).logsumexp(-1).t()
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_alibi_by_hand():
    one_hot = torch.eye(8)[:3, None]
    out, lse = page([zero_keys(3, 1, 8)], [one_hot]).attend(
        None, torch.ones(1, 2, 8), alibi_slopes=torch.tensor([1.0, 0.5])
    )
    torch.testing.assert_close(out[0, 0, :3], torch.tensor([0.0900, 0.2447, 0.6652]).double(), rtol=0, atol=5e-5)
    torch.testing.assert_close(lse[0, 0].item(), 0.4076, rtol=0, atol=5e-5)


def test_softcap_by_hand():
    keys = torch.zeros(2, 1, 64)
    keys[0, 0, 0], keys[1, 0, 0] = 60 * 8, 30 * 8
    query = torch.zeros(1, 1, 64)
    query[0, 0, 0] = 1
    out, _ = page([keys], [torch.eye(64)[:2, None]]).attend(None, query, scale=1 / 8, softcap=30.0)
    torch.testing.assert_close(out[0, 0, :2], torch.tensor([0.99770, 0.00230]).double(), rtol=0, atol=5e-6)


def test_sink_by_hand():
    """Three keys of score 0 and a sink of ln 2: each key weighs 1 / (3 + 2)."""
    sinks = torch.tensor([math.log(2.0)])
    out, lse = page([zero_keys(3)], [torch.ones(3, 1, 64)]).attend(None, torch.ones(1, 1, 64), sinks=sinks)
    torch.testing.assert_close(out[0, 0, 0].item(), 0.6, rtol=1e-6, atol=0)
    torch.testing.assert_close(lse[0, 0].item(), math.log(5.0), rtol=1e-6, atol=0)
    empty = page([zero_keys(1)], [zero_keys(1)])
    empty.seq_lens.zero_()
    out, lse = empty.attend(None, torch.ones(1, 1, 64), sinks=sinks)
    assert not out.any() and lse[0, 0].item() == sinks.double().item()


@pytest.mark.parametrize(
    "causal,left,right,means",
    [
        (True, -1, -1, [2.5, 3.0, 3.5]),
        (True, 2, -1, [4.0, 5.0, 6.0]),
        (True, 0, 5, [5.0, 6.0, 7.0]),
        (False, -1, -1, [3.5, 3.5, 3.5]),
        (False, 1, 1, [5.0, 6.0, 6.5]),
        (False, -1, 0, [2.5, 3.0, 3.5]),
        (False, 0, -1, [6.0, 6.5, 7.0]),
    ],
)
def test_masks_by_hand(causal, left, right, means):
    """Three queries at 5, 6 and 7 over eight keys, V[j] = j."""
    batch = page([zero_keys(8)], [positions_as_values(8)], block_size=4)
    out, _ = batch.attend(None, torch.ones(3, 1, 64), [3], causal=causal, window_left=left, window_right=right)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor(means).double(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_fp8_decodes_as_torch_does_and_encodes_its_own_values(dtype):
    stored = torch.arange(256, dtype=torch.uint8).view(dtype)
    values = reference.decode(stored)
    torch.testing.assert_close(values, stored.double(), rtol=0, atol=0, equal_nan=True)
    finite = values.isfinite()
    assert torch.equal(reference.encode(values, dtype).view(torch.uint8)[finite], stored.view(torch.uint8)[finite])


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_fp8_encodes_as_torch_does_within_range(dtype):
    values = torch.randn(50000) * 2.0 ** torch.randint(-12, 7, (50000,))
    values = values[values.abs() <= 448]
    assert torch.equal(reference.encode(values, dtype).view(torch.uint8), values.to(dtype).view(torch.uint8))


def test_fp8_edges_by_hand():
    inf, nan = math.inf, math.nan
    values = torch.tensor([448, 464, 465, 1e5, inf, -inf, nan, -nan, -0.0, 0.001, 2.0**-10, 3 * 2.0**-10, 2.0**-11])
    wanted = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0x80, 0x01, 0x00, 0x02, 0x00]
    assert reference.encode(values, torch.float8_e4m3fn).view(torch.uint8).tolist() == wanted
    values = torch.tensor([57344, 61440, 1e30, inf, -inf, nan, -0.0, 2.0**-16, 2.0**-17, 3 * 2.0**-17, 1.125])
    wanted = [0x7B, 0x7B, 0x7B, 0x7B, 0xFB, 0x7F, 0x80, 0x01, 0x00, 0x02, 0x3C]
    assert reference.encode(values, torch.float8_e5m2).view(torch.uint8).tolist() == wanted


def test_rope_by_hand():
    """A quarter turn takes (x, y) to (-y, x)."""
    row = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    quarter = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    halves = reference.cache.rotate(row, 0, quarter, interleaved=False)
    pairs = reference.cache.rotate(row, 0, quarter, interleaved=True)
    assert halves.tolist() == [[-3.0, -4.0, 1.0, 2.0, 5.0]]
    assert pairs.tolist() == [[-2.0, 1.0, -4.0, 3.0, 5.0]]


def test_merge_by_hand():
    """Parts of weight 1 and 3."""
    a, b = torch.full((1, 1, 8), 4.0), torch.full((1, 1, 8), 8.0)
    out, lse = reference.merge_attention_states(a, torch.zeros(1, 1), b, torch.full((1, 1), math.log(3.0)))
    torch.testing.assert_close(out, torch.full((1, 1, 8), 7.0).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse.item(), math.log(4.0), rtol=1e-6, atol=0)
