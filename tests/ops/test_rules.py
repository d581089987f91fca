"""The rules of the op contract that need more than a comparison with the reference. Named by rule."""

import math
from dataclasses import replace

import pytest
import torch

from pagedkern.testing import compare, layouts
from pagedkern.testing.backends import ALL_THREADS
from pagedkern.testing.cases import BF16, E4M3, E5M2, FP16, FP32, AttentionCase
from pagedkern.testing.inputs import AttentionInputs, build_attention, live_keys
from pagedkern.testing.judge import judge_attention
from pagedkern.testing.paged import page

MIX = AttentionCase("mix", seq_lens=(40, 3, 0, 129, 16), q_lens=(1, 3, 2, 17, 1), padding_rows=2)
RULE_CASES = [
    MIX,
    replace(MIX, name="fp16", dtype=FP16, head_dim=80, cache_layout="HND"),
    replace(MIX, name="fp32", dtype=FP32, head_dim=24, block_size=1),
    replace(MIX, name="e4m3", cache_dtype=E4M3, k_scale="head", v_scale="token", head_dim=128),
    replace(MIX, name="e5m2", cache_dtype=E5M2, k_scale="token", v_scale="token_strided", heads=(6, 2)),
    replace(MIX, name="window", window=(9, -1), cache_dtype=E4M3, k_scale="token", v_scale="token"),
    replace(MIX, name="options", softcap=3.0, alibi=True, sinks=True, heads=(8, 2), block_size=8),
    replace(MIX, name="splits", num_splits=4, seq_lens=(300, 3, 0, 129, 77), q_lens=(1, 1, 1, 4, 2)),
    AttentionCase("decode", seq_lens=(40, 1, 0, 700), heads=(8, 2), head_dim=128),
    AttentionCase("decode-window", seq_lens=(40, 1, 0, 700), window=(100, -1), num_splits=3),
    AttentionCase("decode-fp8", seq_lens=(40, 1, 0, 700), heads=(8, 2), cache_dtype=E4M3, k_scale="tensor"),
]


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


# Rule 2. Dead bits: NaN, infinities, zeros, and bytes that are large values in every format.
DEAD_BYTES = (0x00, 0x7F, 0x7E, 0x7C, 0xFC, 0x80)


def live_elements(inputs: AttentionInputs) -> torch.Tensor:
    """bool [num_blocks, block_size]: the slots that some query row sees."""
    case = inputs.case
    live = torch.zeros(inputs.cache.key.shape[:2], dtype=torch.bool)
    for seq, keys in enumerate(live_keys(case)):
        position = torch.arange(keys.start, keys.stop)
        live[inputs.block_table[seq].long()[position // case.block_size], position % case.block_size] = True
    return live


def refill_dead(inputs: AttentionInputs, byte: int) -> None:
    """Every byte of both caches that is not live becomes `byte`; dead scales and dead table entries change too."""
    live = live_elements(inputs)
    for name, buffer in (("key", inputs.cache.buffers[0]), ("value", inputs.cache.buffers[-1])):
        view = getattr(inputs.cache, name)
        kept = torch.zeros(buffer.base.numel(), dtype=torch.bool)
        kept.as_strided(view.shape, view.stride(), view.storage_offset())[live] = True
        buffer.bytes()[~kept.repeat_interleave(view.element_size())] = byte
    for scale in (inputs.k_scale, inputs.v_scale):
        if scale is not None and scale.dim() == 3:
            scale[~live] = {0x00: 0.0, 0x7F: math.nan}.get(byte, math.inf)
    for seq, keys in enumerate(live_keys(inputs.case)):
        size = inputs.case.block_size
        used = range(keys.start // size, -(-keys.stop // size)) if keys else range(0)
        for column in range(inputs.block_table.size(1)):
            if column not in used:
                inputs.block_table[seq, column] = (column + byte) % inputs.cache.key.size(0) if byte < 0x7E else -byte


@pytest.mark.one_order
@by_name(RULE_CASES)
def test_rule_2_what_no_row_sees_cannot_change_a_bit(backend, case):
    assert case.cache_layout in ("NHD", "HND"), "refill_dead takes K and V apart"
    first = build_attention(case)
    first.call(backend.op("paged_attention"))
    for byte in DEAD_BYTES:
        other = build_attention(case)
        refill_dead(other, byte)
        other.call(backend.op("paged_attention"))
        compare.assert_same_bytes(other.out.view, first.out.view, f"out with dead bytes {byte:#x}")
        compare.assert_same_bytes(other.lse.view, first.lse.view, f"lse with dead bytes {byte:#x}")


@pytest.mark.ops("paged_attention")
@pytest.mark.one_order
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("dtype", [BF16, FP32, FP16], ids=str)
def test_rule_3_minus_infinity_is_a_score_like_any_other(backend, dtype, q_len, num_splits):
    """Keys of score -inf weigh nothing, wherever they stand: a first tile of them, the middle, or all but one."""
    query = torch.ones(q_len, 2, 64, dtype=dtype)
    position = torch.arange(300)
    finite = [position >= 280, (position < 30) | (position > 290), position == 292, (position // 7) % 2 == 0]
    keys, values = torch.randn(4, 300, 1, 64), torch.randn(4, 300, 1, 64)
    for index, mask in enumerate(finite):
        keys[index, ~mask] = -math.inf
    batch = page(list(keys), list(values), dtype=dtype)
    query = query.repeat(4, 1, 1)
    # The first queries of a sequence may see no finite score at all: their rows are not judged.
    judged = torch.tensor([bool(m[: 300 - q_len + i + 1].any()) for m in finite for i in range(q_len)])
    out, lse = batch.attend(backend, query, [q_len] * 4, scale=0.01, num_splits=num_splits)
    expected, expected_lse = batch.attend(None, query, [q_len] * 4, scale=0.01)
    compare.assert_close(out[judged], expected[judged], dtype)
    compare.assert_lse_close(lse[judged], expected_lse[judged])


@pytest.mark.ops("paged_attention")
@pytest.mark.one_order
@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_rule_3_far_apart_scores_do_not_overflow(backend, dtype, scale):
    keys, values = 5 * torch.randn(400, 1, 64), torch.randn(400, 1, 64)
    batch = page([keys], [values], dtype=dtype)
    query = torch.randn(3, 2, 64).to(dtype)
    out, lse = batch.attend(backend, query, [3], scale=scale)
    expected, expected_lse = batch.attend(None, query, [3], scale=scale)
    compare.assert_lse_close(lse, expected_lse)
    # Float32 scores of some hundred carry errors of 1e-5 into the weights: bf16's tolerance holds for both.
    compare.assert_close(out, expected, BF16)


# Rule 5.
ALONE_OPTIONS = [
    {}, {"cache_dtype": E4M3, "k_scale": "head", "v_scale": "tensor"}, {"cache_dtype": E5M2, "k_scale": "token"},
    {"window": (30, -1)}, {"softcap": 4.0, "sinks": True, "alibi": True}, {"dtype": FP32},
    {"dtype": FP16, "head_dim": 96},
    {"heads": (7, 1), "head_dim": 128}, {"heads": (150, 1)}, {"block_size": 1}, {"causal": False, "window": (50, 20)},
]  # fmt: skip


def slice_sequence(inputs: AttentionInputs, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.tensor([0, *inputs.case.query_lens]).cumsum(0)
    rows = slice(int(starts[seq]), int(starts[seq + 1]))
    return inputs.out.view[rows], inputs.lse.view[rows]


def transplant(alone: AttentionInputs, batch: AttentionInputs, seq: int) -> None:
    """Puts the only sequence of `alone` into place `seq` of `batch`, whose pages lie elsewhere."""
    case = batch.case
    starts = torch.tensor([0, *case.query_lens]).cumsum(0)
    batch.query.view[int(starts[seq]) : int(starts[seq + 1])] = alone.query.view
    for column in range(-(-case.seq_lens[seq] // case.block_size)):
        source, target = int(alone.block_table[0, column]), int(batch.block_table[seq, column])
        if not 0 <= source < alone.cache.key.size(0) or not 0 <= target < batch.cache.key.size(0):
            continue  # wholly outside the window in both
        for old, new in ((alone.cache.key, batch.cache.key), (alone.cache.value, batch.cache.value)):
            size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[old.element_size()]
            new.view(size)[target] = old.view(size)[source]
        for old, new in ((alone.k_scale, batch.k_scale), (alone.v_scale, batch.v_scale)):
            if old is not None and old.dim() == 3:
                new[target] = old[source]
    for name in ("k_scale", "v_scale", "alibi_slopes", "sinks"):
        old = getattr(alone, name)
        if old is not None and old.dim() < 3:
            setattr(batch, name, old)


@pytest.mark.ops("paged_attention")
@pytest.mark.one_order
@pytest.mark.parametrize("options", ALONE_OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("q_len,seq_len", [(1, 333), (1, 17), (4, 130), (33, 70)])
def test_rule_5_a_row_depends_on_its_own_sequence_alone(backend, q_len, seq_len, num_splits, options):
    case = replace(AttentionCase("alone", (seq_len,), (q_len,), num_splits=num_splits), **options)
    alone = build_attention(case, seed=1)
    alone.call(backend.op("paged_attention"))
    neighbours = [(1, 5), (20, 200), (1, 900), (3, 3), (0, 4), (1, 64)]
    for place, count in ((0, 1), (0, 6), (3, 6), (2, 2)):
        others = neighbours[:count]
        lens = others[:place] + [(q_len, seq_len)] + others[place:]
        batch_case = replace(
            case, q_lens=tuple(q for q, _ in lens), seq_lens=tuple(k for _, k in lens), bound_slack=100 * place,
            table_slack=1 + place, padding_rows=place,
        )  # fmt: skip
        batch = build_attention(batch_case, seed=2 + place)
        transplant(alone, batch, place)
        batch.call(backend.op("paged_attention"))
        for got, wanted, what in zip(
            slice_sequence(batch, place), slice_sequence(alone, 0), ("out", "lse"), strict=True
        ):
            compare.assert_same_bytes(got, wanted, f"{what} at place {place} of {count + 1}")


@pytest.mark.ops("paged_attention")
@pytest.mark.one_order
@pytest.mark.parametrize("num_splits", [1, 3])
def test_rule_5_decode_without_cu_seqlens_is_the_same(backend, num_splits):
    case = AttentionCase("decode", (333, 5, 64), num_splits=num_splits)
    plain, ragged = build_attention(case), build_attention(replace(case, q_lens=(1, 1, 1)))
    for inputs in (plain, ragged):
        inputs.call(backend.op("paged_attention"))
    compare.assert_same_bytes(ragged.out.view, plain.out.view, "out")
    compare.assert_same_bytes(ragged.lse.view, plain.lse.view, "lse")


@pytest.mark.one_order
@by_name(RULE_CASES)
def test_rule_5_threads_and_repetition_change_nothing(backend, case):
    case = replace(case, num_splits=case.num_splits or 1)
    results = []
    for threads in (ALL_THREADS, 1, 3, ALL_THREADS):
        inputs = build_attention(case)
        inputs.call(backend.op("paged_attention", threads))
        results.append(inputs)
    for other in results[1:]:
        compare.assert_same_bytes(other.out.view, results[0].out.view, "out")
        compare.assert_same_bytes(other.lse.view, results[0].lse.view, "lse")


@pytest.mark.one_order
@by_name(RULE_CASES)
def test_rule_7_upper_bounds_may_exceed_the_truth(backend, case):
    judge_attention(backend, replace(case, bound_slack=3000, workspace=True))


@pytest.mark.ops("paged_attention", "reshape_and_cache")
def test_rule_11_padding_rows_are_not_touched(backend):
    judge_attention(backend, replace(MIX, padding_rows=40))
    rows = torch.full((9, 2, 64), math.nan).bfloat16()
    rows[:3] = 1.0
    pair = layouts.cache_pair("NHD", (2, 16, 2, 64), BF16, "zero")
    backend.op("reshape_and_cache")(rows, rows, pair.key, pair.value, torch.arange(3))
    assert pair.key.float().sum() == 3 * 2 * 64 and pair.value.float().sum() == 3 * 2 * 64


def test_rule_12_sizes_of_zero_do_nothing(backend):
    """Zero tokens, sequences, pairs and layers; a cache without blocks. paged_attention's are in the case list."""
    int32, int64 = torch.int32, torch.int64
    rows, pair = torch.zeros(0, 2, 64).bfloat16(), layouts.cache_pair("NHD", (2, 16, 2, 64), BF16, "sentinel")
    before = pair.clone()
    caches, none = (pair.key, pair.value), torch.zeros(0, dtype=int64)
    backend.op("reshape_and_cache")(rows, rows, *caches, none)
    turn = (torch.zeros(0, dtype=int64), torch.zeros(4, 64))
    backend.op("rope_reshape_and_cache")(torch.zeros(0, 4, 64).bfloat16(), rows, rows.clone(), *caches, *turn, none)
    fp8 = [torch.zeros(2, 16, 2, 64, dtype=torch.uint8).view(E4M3) for _ in range(2)]
    backend.op("reshape_and_cache_dynamic")(rows, rows, *fp8, torch.ones(2, 16, 2), torch.ones(2, 16, 2), none)
    backend.op("copy_blocks")([pair.key], [pair.value], torch.zeros(0, 2, dtype=int64))
    backend.op("copy_blocks")([], [], torch.zeros(0, 2, dtype=int64))
    backend.op("swap_blocks")(pair.key, pair.value, torch.zeros(0, 2, dtype=int64))
    table, lens = torch.zeros(0, 0, dtype=int32), torch.zeros(0, dtype=int32)
    backend.op("gather_cache")(rows, rows.clone(), *caches, table, lens, torch.zeros(1, dtype=int32))
    lse = torch.zeros(0, 2)
    backend.op("merge_attention_states")(rows, lse, rows.clone(), lse.clone(), rows.clone(), lse.clone())
    nothing = torch.zeros(0, 16, 2, 64).bfloat16()
    backend.op("reshape_and_cache")(rows, rows, nothing, nothing.clone(), none)
    out = torch.ones(2, 4, 64).bfloat16()
    lens = torch.zeros(2, dtype=int32)
    backend.op("paged_attention")(
        out, out.clone(), nothing, nothing.clone(), table.new_zeros(2, 0), lens, None, 1, 0, 1.0
    )
    assert not out.any()
    for got, wanted in zip(pair.buffers, before.buffers, strict=True):
        compare.assert_same_bytes(got.bytes(), wanted.bytes(), "cache")


@pytest.mark.ops("paged_attention")
@pytest.mark.one_order
@pytest.mark.parametrize("q_len", [1, 40])
def test_rule_13_a_value_scale_for_each_token_is_not_rounded(backend, q_len):
    """Every row sees its own key alone; the scale as a bfloat16 would be off by 0.3 %, and so the product by 0.7 %."""
    case = AttentionCase("own-key", seq_lens=(q_len,), q_lens=(q_len,), heads=(2, 2), cache_dtype=E4M3,
                         window=(0, -1), k_scale="token", v_scale="token")  # fmt: skip
    inputs = build_attention(case)
    scale, value = 1.03466796875, 1.125
    inputs.v_scale.fill_(scale)
    inputs.cache.value.fill_(value)
    inputs.call(backend.op("paged_attention"))
    out = inputs.out.view
    compare.assert_close(out, torch.full(out.shape, scale * value, dtype=torch.float64), case.dtype)
