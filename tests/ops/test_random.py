"""Randomised differential tests: any mix of options, sizes and layouts; --random-cases sets how many.

A failure names the case; rerun it alone with -k "seed_<n>]".
"""

import random
from dataclasses import replace

import pytest
import torch

from pagedkern.testing.cache_cases import GatherCase, MergeCase, MoveCase, WriteCase
from pagedkern.testing.cases import BF16, BLOCK_SIZES, E4M3, E5M2, FP16, FP32, HEAD_DIMS, SCALE_KINDS, AttentionCase
from pagedkern.testing.judge import judge_attention
from pagedkern.testing.judge_cache import judge_gather, judge_merge, judge_move, judge_write
from pagedkern.testing.layouts import CACHE_LAYOUTS, INPUT_ONLY_LAYOUTS, ROW_LAYOUTS

WORK_LIMIT = 3_000_000
INT_TYPES = (torch.int32, torch.int64)


def random_lengths(rng: random.Random) -> tuple[list[int], list[int] | None]:
    """seq_lens and q_lens of a decode, verify, prefill, chunk or mixed batch."""
    kind = rng.choice(("decode", "decode", "verify", "prefill", "chunk", "mixed"))
    count = rng.choice((1, 1, 2, 3, 5, 9))
    top = rng.choice((3, 20, 70, 300, 1000))
    seq_lens = [rng.randint(0, top) for _ in range(count)]
    if kind == "decode":
        return seq_lens, None if rng.random() < 0.5 else [1] * count
    if kind == "verify":
        return seq_lens, [rng.choice((2, 4, 8))] * count
    if kind == "prefill":
        return seq_lens, list(seq_lens)
    q_lens = [rng.randint(0, min(n, 40)) for n in seq_lens]
    if kind == "mixed":
        q_lens = [rng.choice((1, 1, q, rng.randint(0, 12))) for q in q_lens]
    return seq_lens, q_lens


def random_attention(seed: int) -> AttentionCase:
    rng = random.Random(seed)
    while True:
        case = _random_attention(rng, seed)
        if case.work <= WORK_LIMIT:
            return case


def _random_attention(rng: random.Random, seed: int) -> AttentionCase:
    seq_lens, q_lens = random_lengths(rng)
    kv_heads = rng.choice((1, 1, 2, 3, 4, 8))
    cache_dtype = rng.choice((None, None, E4M3, E5M2))
    scale_kinds = SCALE_KINDS if cache_dtype else (None,)
    unbounded = rng.random() < 0.5
    return AttentionCase(
        name=f"seed_{seed}",
        seq_lens=tuple(seq_lens),
        q_lens=None if q_lens is None else tuple(q_lens),
        heads=(kv_heads * rng.choice((1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 70, 150)), kv_heads),
        head_dim=rng.choice((64, 128, 32, rng.choice(HEAD_DIMS))),
        block_size=rng.choice((16, 16, rng.choice(BLOCK_SIZES), rng.randint(1, 70))),
        dtype=rng.choice((BF16, BF16, FP16, FP32)),
        cache_dtype=cache_dtype,
        causal=rng.random() < 0.7,
        window=(-1, -1) if unbounded else (rng.choice((-1, 0, 5, 64, 200)), rng.choice((-1, -1, 0, 3, 50))),
        softcap=rng.choice((0.0, 0.0, 0.0, 1.5, 30.0)),
        alibi=rng.random() < 0.2,
        sinks=rng.random() < 0.2,
        k_scale=rng.choice(scale_kinds),
        v_scale=rng.choice(scale_kinds),
        scale=rng.choice((None, None, 0.05, 0.3)),
        query_layout=rng.choice(("contiguous", "fused", *ROW_LAYOUTS, *INPUT_ONLY_LAYOUTS)),
        out_layout=rng.choice(("contiguous", *ROW_LAYOUTS)),
        cache_layout=rng.choice(tuple(CACHE_LAYOUTS)),
        lse_layout=rng.choice((None, "contiguous", "head_major", "odd_stride")),
        num_splits=rng.choice((0, 0, 0, 1, 2, 3, 8, 100)),
        workspace=rng.random() < 0.3,
        padding_rows=0 if q_lens is None else rng.choice((0, 0, 5)),
        table_slack=rng.choice((0, 1, 4)),
        table_stride_slack=rng.choice((0, 3)),
        bound_slack=rng.choice((0, 0, 7, 5000)),
        shared_blocks=rng.choice((0, 0, 1, 3)),
    )


def random_write(seed: int) -> WriteCase:
    rng = random.Random(seed)
    op = rng.choice(("plain", "plain", "dynamic", "rope"))
    cache_dtype = rng.choice((E4M3, E5M2) if op == "dynamic" else (None, E4M3, E5M2))
    kinds = ("token", "token_strided") if op == "dynamic" else SCALE_KINDS if cache_dtype else (None,)
    dtype = rng.choice((BF16, FP16, FP32))
    head_dim, kv_heads = rng.choice(HEAD_DIMS), rng.choice((1, 2, 3, 8))
    written = tuple(ROW_LAYOUTS)
    return WriteCase(
        name=f"seed_{seed}",
        op=op,
        tokens=rng.choice((1, 3, 8, 17, 40)),
        heads=(kv_heads * rng.choice((1, 2, 7)), kv_heads),
        head_dim=head_dim,
        block_size=rng.choice(BLOCK_SIZES[:6]),
        dtype=dtype,
        cache_dtype=cache_dtype,
        key_layout=rng.choice(written if op == "rope" else (*written, *INPUT_ONLY_LAYOUTS)),
        value_layout=rng.choice((*written, *INPUT_ONLY_LAYOUTS)),
        query_layout=rng.choice(written),
        cache_layout=rng.choice(tuple(CACHE_LAYOUTS)),
        k_scale=rng.choice(kinds),
        v_scale=rng.choice(kinds),
        slots=rng.choice(("scattered", "run", "skips")),
        slot_dtype=rng.choice(INT_TYPES),
        slot_stride=rng.choice((1, 1, 3)),
        extra_rows=rng.choice((0, 4)),
        rotary_dim=rng.choice((None, 2, head_dim // 2)),
        interleaved=rng.random() < 0.5,
        cos_sin_dtype=rng.choice((FP32, dtype)),
        position_dtype=rng.choice(INT_TYPES),
    )


def random_merge(seed: int) -> MergeCase:
    rng = random.Random(seed)
    dtype = rng.choice((BF16, FP16, FP32))
    return MergeCase(
        name=f"seed_{seed}",
        tokens=rng.choice((1, 5, 33)),
        heads=rng.choice((1, 3, 8)),
        head_dim=rng.choice(HEAD_DIMS),
        dtype=dtype,
        a_dtype=rng.choice((dtype, FP32)),
        b_dtype=rng.choice((dtype, FP32)),
        out_layout=rng.choice(tuple(ROW_LAYOUTS)),
        a_layout=rng.choice(tuple(ROW_LAYOUTS)),
        b_layout=rng.choice(tuple(ROW_LAYOUTS)),
        lse_layout=rng.choice((None, "contiguous", "odd_stride")),
        part_lse_layout=rng.choice(("contiguous", "head_major", "odd_stride")),
    )


def fitted(make, seed: int, backend):
    """The seed's case; on a backend that is slow or without float32 one that it can take: float32 becomes bfloat16, and
    a case too large gives way to that of another seed."""
    case = next(c for c in (make(seed + 10_000 * i) for i in range(1000)) if c.work <= backend.max_work)
    return case if backend.float32 or case.dtype != FP32 else replace(case, dtype=BF16)


@pytest.mark.ops("paged_attention")
def test_attention(backend, random_seed):
    case = fitted(random_attention, random_seed, backend)
    try:
        judge_attention(backend, case, random_seed)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from None


def random_gather(seed: int) -> GatherCase:
    rng = random.Random(seed)
    cache_dtype = rng.choice((None, E4M3, E5M2))
    scale_kinds = SCALE_KINDS if cache_dtype else (None,)
    return GatherCase(
        name=f"seed_{seed}",
        seq_lens=tuple(rng.choice((0, 1, 16, rng.randint(0, 150))) for _ in range(rng.choice((1, 2, 5, 9)))),
        kv_heads=rng.choice((1, 2, 3, 8)),
        head_dim=rng.choice(HEAD_DIMS),
        block_size=rng.choice((16, rng.choice(BLOCK_SIZES[:6]))),
        dtype=rng.choice((BF16, FP16, FP32)),
        cache_dtype=cache_dtype,
        key_layout=rng.choice(tuple(ROW_LAYOUTS)),
        value_layout=rng.choice(tuple(ROW_LAYOUTS)),
        cache_layout=rng.choice(tuple(CACHE_LAYOUTS)),
        k_scale=rng.choice(scale_kinds),
        v_scale=rng.choice(scale_kinds),
    )


def random_move(seed: int) -> MoveCase:
    """copy_blocks over layers of any layouts, or swap_blocks between two; runs of adjacent pairs and single ones."""
    rng = random.Random(seed)
    num_blocks = rng.choice((4, 30, 80))
    ids = list(range(num_blocks))
    rng.shuffle(ids)
    if rng.random() < 0.5:
        half = num_blocks // 2
        ids = [*range(half), *range(half, num_blocks)]
    count = rng.randint(1, num_blocks // 2)
    return MoveCase(
        name=f"seed_{seed}",
        op=rng.choice(("copy", "swap")),
        layers=rng.choice((1, 2, 3)),
        num_blocks=num_blocks,
        kv_heads=rng.choice((1, 2, 5)),
        head_dim=rng.choice(HEAD_DIMS[:16]),
        block_size=rng.choice((1, 8, 16, rng.randint(1, 20))),
        dtype=rng.choice((BF16, FP32, E4M3)),
        layouts=tuple(rng.choice(tuple(CACHE_LAYOUTS)) for _ in range(3)),
        pairs=tuple(zip(ids[:count], ids[num_blocks // 2 :][:count], strict=True)),
        mapping_layout=rng.choice(("contiguous", "strided", "transposed")),
        dst_layout=rng.choice(tuple(CACHE_LAYOUTS)),
    )


MOVERS = ("gather_cache", "copy_blocks", "swap_blocks")


@pytest.mark.every(4)
@pytest.mark.ops(*MOVERS)
def test_gather_and_move(backend, random_seed):
    gather = fitted(random_gather, random_seed, backend)
    for case, judge in ((gather, judge_gather), (random_move(random_seed), judge_move)):
        try:
            judge(backend, case, random_seed)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


WRITERS = ("reshape_and_cache", "reshape_and_cache_dynamic", "rope_reshape_and_cache")


@pytest.mark.ops(*WRITERS, "merge_attention_states")
def test_write_and_merge(backend, random_seed):
    write, merge = (fitted(make, random_seed, backend) for make in (random_write, random_merge))
    for case, judge in ((write, judge_write), (merge, judge_merge)):
        try:
            judge(backend, case, random_seed)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None
