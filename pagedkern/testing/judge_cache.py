"""Runs one case of a cache op on one backend; whole allocations must equal the reference's, byte for byte."""

import torch

from pagedkern import reference
from pagedkern.testing import compare, layouts
from pagedkern.testing.backends import Backend
from pagedkern.testing.cache_cases import GatherCase, MergeCase, MoveCase, WriteCase
from pagedkern.testing.inputs import scale_tensor, store_rows
from pagedkern.testing.judge import assert_rest_untouched, rows_only
from pagedkern.testing.layouts import CachePair
from pagedkern.testing.poison import BAD_BLOCKS, Buffer, poison_block_table

# +-448 and +-57344 are the last values of the formats, 464 and 61440 the first beyond rounding to them.
SPECIALS = (
    float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 448.0, 464.0, 465.0, -480.0, 57344.0, 61440.0, 65504.0, 1e5,
    0.001, 2.0**-10, -(2.0**-10), 2.0**-9 * 1.5, 2.0**-17, 3.0 * 2.0**-18, 1e-30,
)  # fmt: skip


def filled_rows(layout: str, shape, dtype: torch.dtype, live_rows: int, generator, specials: bool) -> Buffer:
    """Random rows of many magnitudes, NaN behind them."""
    buffer = layouts.rows(layout, shape, dtype, "nan")
    rows = buffer.view[:live_rows]
    for token in range(rows.size(0) if shape[0] and rows.stride(0) else min(live_rows, 1)):
        for head in range(shape[1] if rows.stride(1) else 1):
            values = torch.randn(shape[2], generator=generator) * 2.0 ** torch.randint(-6, 7, (1,), generator=generator)
            if specials and token % 2 == 0:
                picks = torch.randint(len(SPECIALS), (shape[2],), generator=generator)
                special = torch.rand(shape[2], generator=generator) < 0.2
                values = torch.where(special, torch.tensor(SPECIALS)[picks], values)
            rows[token, head] = values.to(dtype)
    return buffer


def slot_mapping(case: WriteCase, generator) -> torch.Tensor:
    slots = torch.randperm(case.num_blocks * case.block_size, generator=generator)[: case.tokens]
    if case.slots == "run":
        slots = torch.arange(case.tokens) + 1
    if case.slots == "skips":
        slots[::3] = -1
        slots[1::6] = -(2**31)
    if case.slots == "all_negative":
        slots[:] = -1
    whole = torch.full((max(case.tokens * case.slot_stride, 1),), 2**31 - 1, dtype=case.slot_dtype)
    view = whole[: case.tokens * case.slot_stride : case.slot_stride]
    view.copy_(slots)
    return view


def write_inputs(case: WriteCase, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = case.heads
    rows = case.tokens + case.extra_rows
    shape = (rows, kv_heads, case.head_dim)
    cache_shape = (case.num_blocks, case.block_size, kv_heads, case.head_dim)
    key_specials = case.specials and case.op != "rope"
    inputs = {
        "key": filled_rows(case.key_layout, shape, case.dtype, case.tokens, generator, key_specials),
        "value": filled_rows(case.value_layout, shape, case.dtype, case.tokens, generator, case.specials),
        "cache": layouts.cache_pair(case.cache_layout, cache_shape, case.stored_dtype, "sentinel"),
        "slots": slot_mapping(case, generator),
    }
    # Scales that are no powers of two: the quotient must be one correctly rounded division.
    for name, kind in (("k_scale", case.k_scale), ("v_scale", case.v_scale)):
        inputs[name] = scale_tensor(kind, cache_shape, generator, "cpu", low=0.1, high=3.0)
    if case.op == "rope":
        rotary_dim = case.rotary_dim or case.head_dim
        query_shape = (rows, heads, case.head_dim)
        inputs["query"] = filled_rows(case.query_layout, query_shape, case.dtype, case.tokens, generator, False)
        positions = torch.randint(0, 800, (rows,), generator=generator)
        if rows:
            positions[0] = 0
        positions[case.tokens :] = 10**6
        inputs["positions"] = positions.to(case.position_dtype)
        angles = torch.arange(800)[:, None] * 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
        inputs["cos_sin"] = torch.cat([angles.cos(), angles.sin()], 1).to(case.cos_sin_dtype)
    return inputs


def whole_storage(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The bytes of the allocation behind a tensor."""
    return None if tensor is None else torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def same_caches(actual: CachePair, expected: CachePair) -> None:
    for name, view in (("key_cache", "key"), ("value_cache", "value")):
        compare.assert_same_bytes(getattr(actual, view), getattr(expected, view), name)
    for index, (got, wanted) in enumerate(zip(actual.buffers, expected.buffers, strict=True)):
        compare.assert_same_bytes(got.bytes(), wanted.bytes(), f"allocation {index} around the caches")


def judge_write(backend: Backend, case: WriteCase, seed: int = 0) -> None:
    inputs = write_inputs(case, seed)
    {"plain": _judge_plain, "dynamic": _judge_dynamic, "rope": _judge_rope}[case.op](backend, case, inputs)


def _judge_plain(backend: Backend, case: WriteCase, inputs: dict) -> None:
    expected = inputs["cache"].clone()
    before = {name: inputs[name].clone() for name in ("key", "value")}
    key, value = inputs["key"].view, inputs["value"].view
    scales = (inputs["k_scale"], inputs["v_scale"])
    reference.reshape_and_cache(key, value, expected.key, expected.value, inputs["slots"], *scales)
    run_write(backend, "reshape_and_cache", inputs, scales)
    same_caches(inputs["cache"], expected)
    for name, old in before.items():
        compare.assert_same_bytes(inputs[name].bytes(), old.bytes(), f"{name}, which is only read")


def run_write(backend: Backend, op: str, inputs: dict, scales: tuple) -> None:
    cache = inputs["cache"]
    backend.op(op)(inputs["key"].view, inputs["value"].view, cache.key, cache.value, inputs["slots"], *scales)


def _judge_dynamic(backend: Backend, case: WriteCase, inputs: dict) -> None:
    expected = inputs["cache"].clone()
    wanted_scales = []
    for name in ("k_scale", "v_scale"):
        scale = inputs[name]
        storage = whole_storage(scale).clone().view(torch.float32)
        wanted_scales.append(storage.as_strided(scale.shape, scale.stride(), scale.storage_offset()))
    key, value, cache = inputs["key"].view, inputs["value"].view, inputs["cache"]
    slots = inputs["slots"]
    reference.reshape_and_cache_dynamic(key, value, expected.key, expected.value, *wanted_scales, slots)
    backend.op("reshape_and_cache_dynamic")(
        key, value, cache.key, cache.value, inputs["k_scale"], inputs["v_scale"], slots
    )
    for name, wanted in zip(("k_scale", "v_scale"), wanted_scales, strict=True):
        compare.assert_same_bytes(inputs[name], wanted, name)
        compare.assert_same_bytes(whole_storage(inputs[name]), whole_storage(wanted), f"allocation around {name}")
    same_caches(cache, expected)


def _judge_rope(backend: Backend, case: WriteCase, inputs: dict) -> None:
    before = {name: inputs[name].clone() for name in ("query", "key", "value")}
    expected = inputs["cache"].clone()
    cache, scales = inputs["cache"], (inputs["k_scale"], inputs["v_scale"])
    backend.op("rope_reshape_and_cache")(
        inputs["query"].view, inputs["key"].view, inputs["value"].view, cache.key, cache.value, inputs["positions"],
        inputs["cos_sin"], inputs["slots"], case.interleaved, *scales,
    )  # fmt: skip
    for name in ("query", "key"):
        assert_rotated(case, inputs[name], before[name], inputs["positions"], inputs["cos_sin"], name)
    compare.assert_same_bytes(inputs["value"].bytes(), before["value"].bytes(), "value, which is only read")
    # The cache holds the key as it was rounded, so that fused and unfused agree byte for byte.
    key, value = inputs["key"].view, inputs["value"].view
    reference.reshape_and_cache(key, value, expected.key, expected.value, inputs["slots"], *scales)
    same_caches(cache, expected)


def assert_rotated(case: WriteCase, after: Buffer, before: Buffer, positions, cos_sin, what: str) -> None:
    """Rotated in float32 and rounded once: half a unit in the last place, plus float32's error on either product."""
    rotary_dim = cos_sin.size(1)
    rotated = Buffer(after.base, after.view[: case.tokens, :, :rotary_dim])
    assert_rest_untouched(after, before, rotated.owned_bytes(), what)
    for row in range(case.tokens):
        old = before.view[row, :, :rotary_dim].double()
        exact = reference.cache.rotate(old, int(positions[row]), cos_sin, case.interleaved)
        error = (after.view[row, :, :rotary_dim].double() - exact).abs()
        kind = torch.finfo(case.dtype)
        half_ulp = kind.eps / 2 * exact.abs() + kind.tiny * kind.eps
        bound = half_ulp + 2.0**-22 * old.abs().amax(-1, keepdim=True)
        assert (error <= bound).all(), (
            f"{what}: row {row} off by {error.max():.3e}, bound {bound[error > bound][0]:.3e}"
        )


def judge_gather(backend: Backend, case: GatherCase, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // case.block_size) for length in case.seq_lens]
    num_blocks = sum(counts) + 2
    shape = (num_blocks, case.block_size, case.kv_heads, case.head_dim)
    cache = layouts.cache_pair(case.cache_layout, shape, case.stored_dtype, "nan")
    k_scale = scale_tensor(case.k_scale, shape, generator, "cpu")
    v_scale = scale_tensor(case.v_scale, shape, generator, "cpu")
    table = torch.full((len(counts), max(counts, default=0) + 2), -1, dtype=torch.int32)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    for seq, length in enumerate(case.seq_lens):
        for column in range(counts[seq]):
            table[seq, column] = free.pop()
        position = torch.arange(length)
        blocks, offsets = table[seq].long()[position // case.block_size], position % case.block_size
        for tensor, scale in ((cache.key, k_scale), (cache.value, v_scale)):
            rows = torch.randn(length, case.kv_heads, case.head_dim, generator=generator)
            store_rows(tensor, scale, blocks, offsets, rows)
    poison_block_table(table, [range(count) for count in counts], [*BAD_BLOCKS, free[-1]])
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    cu_seqlens = torch.tensor([0, *case.seq_lens]).cumsum(0).int()
    total = (sum(case.seq_lens), case.kv_heads, case.head_dim)
    outputs = [layouts.rows(name, total, case.dtype, "sentinel") for name in (case.key_layout, case.value_layout)]
    expected = [output.clone() for output in outputs]
    rest = (cache.key, cache.value, table, seq_lens, cu_seqlens, k_scale, v_scale)
    reference.gather_cache(*(output.view for output in expected), *rest)
    backend.op("gather_cache")(*(output.view for output in outputs), *rest)
    for name, got, wanted in zip(("key", "value"), outputs, expected, strict=True):
        compare.assert_same_bytes(got.view, wanted.view, name)
        compare.assert_same_bytes(got.bytes(), wanted.bytes(), f"allocation around {name}")


# Pairs of lse that matter beside ordinary ones: either part empty, both empty, +inf, far apart.
INF = float("inf")
LSE_PAIRS = ((-INF, 1.0), (1.0, -INF), (-INF, -INF), (INF, 2.0), (2.0, INF), (INF, INF), (INF, -INF), (90.0, -90.0))


def judge_merge(backend: Backend, case: MergeCase, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (case.tokens, case.heads, case.head_dim)
    dtypes = {"a": case.a_dtype or case.dtype, "b": case.b_dtype or case.dtype}
    parts = {
        name: filled_rows(layout, shape, dtypes[name], case.tokens, generator, False)
        for name, layout in (("a", case.a_layout), ("b", case.b_layout))
    }
    lses = {name: layouts.row_heads(case.part_lse_layout, shape[:2], torch.float32, "nan") for name in "ab"}
    for name in "ab":
        lses[name].view.copy_(torch.randn(shape[:2], generator=generator) * 3)
    flat = [(token, head) for token in range(case.tokens) for head in range(case.heads)]
    for index, (token, head) in enumerate(flat[: len(LSE_PAIRS) * 2 : 2]):
        for side, name in enumerate("ab"):
            lses[name].view[token, head] = LSE_PAIRS[index][side]
            if lses[name].view[token, head].isinf() and parts[name].view.stride(0):
                parts[name].view[token, head] = float("nan")
    expected, expected_lse = reference.merge_attention_states(
        parts["a"].view, lses["a"].view, parts["b"].view, lses["b"].view
    )
    out = parts[case.out_is] if case.out_is else layouts.rows(case.out_layout, shape, case.dtype, "sentinel")
    lse = lses[case.lse_is] if case.lse_is else None
    if case.lse_layout and lse is None:
        lse = layouts.row_heads(case.lse_layout, shape[:2], torch.float32, "sentinel")
    before = {"out": (out, out.clone()), "lse": (lse, lse.clone() if lse else None)}
    backend.op("merge_attention_states")(
        out.view, lse.view if lse else None, parts["a"].view, lses["a"].view, parts["b"].view, lses["b"].view
    )
    for name, (after, old) in before.items():
        if after is not None:
            assert_rest_untouched(after, old, rows_only(after, case.tokens), name)
    compare.assert_close(out.view, expected, case.dtype)
    alone = (
        torch.isin(expected, torch.stack([p.view.double() for p in parts.values()])) if case.tokens else expected > 0
    )
    compare.assert_same_bytes(out.view[alone], expected.to(case.dtype)[alone], "rows of one part alone")
    if lse is not None:
        compare.assert_lse_close(lse.view, expected_lse)


def move_mapping(case: MoveCase) -> torch.Tensor:
    pairs = torch.tensor(case.pairs, dtype=torch.int64).reshape(-1, 2)
    if case.mapping_layout == "strided":
        wide = torch.full((pairs.size(0), 5), -7, dtype=torch.int64)
        wide[:, 1:4:2] = pairs
        return wide[:, 1:4:2]
    return pairs.t().contiguous().t() if case.mapping_layout == "transposed" else pairs


def random_pair(case: MoveCase, layout: str, generator) -> CachePair:
    shape = (case.num_blocks, case.block_size, case.kv_heads, case.head_dim)
    pair = layouts.cache_pair(layout, shape, case.dtype, "sentinel")
    for buffer in pair.buffers:
        buffer.bytes().random_(0, 256, generator=generator)
    return pair


def judge_move(backend: Backend, case: MoveCase, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    mapping = move_mapping(case)
    if case.op == "swap":
        source, target = (random_pair(case, name, generator) for name in (case.layouts[0], case.dst_layout))
        expected, unchanged = target.clone(), source.clone()
        reference.swap_blocks(source.key, expected.key, mapping)
        backend.op("swap_blocks")(source.key, target.key, mapping)
        same_caches(target, expected)
        same_caches(source, unchanged)
        return
    layers = [random_pair(case, case.layouts[i % len(case.layouts)], generator) for i in range(case.layers)]
    expected = [layer.clone() for layer in layers]
    reference.copy_blocks([layer.key for layer in expected], [layer.value for layer in expected], mapping)
    backend.op("copy_blocks")([layer.key for layer in layers], [layer.value for layer in layers], mapping)
    for got, wanted in zip(layers, expected, strict=True):
        same_caches(got, wanted)
