"""The judge can fail: wrong variants of the reference, each a fault an op might have, must all be caught."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from pagedkern.reference import attention, cache, fp8, schemas
from pagedkern.testing.backends import REFERENCE
from pagedkern.testing.cache_cases import GATHER_CASES, MERGE_CASES, MOVE_CASES, WRITE_CASES
from pagedkern.testing.cases import ATTENTION_CASES
from pagedkern.testing.judge import judge_attention
from pagedkern.testing.judge_cache import judge_gather, judge_merge, judge_move, judge_write

attend, dequantise, live_range, scale_at = attention.attend, cache.dequantise, attention.live_range, cache.scale_at
paged_attention, encode, rotate = schemas.paged_attention, fp8.encode, cache.rotate


class Mutant:
    """The reference as a backend, with some functions replaced while its ops run, and never while it judges."""

    device, name = "cpu", "mutant"

    def __init__(self, **replacements):
        self.replacements = replacements

    def op(self, name: str):
        def call(*args, **kwargs):
            with ExitStack() as stack:
                for target, replacement in self.replacements.items():
                    module, function = target.split("__")
                    module = {"attention": attention, "cache": cache, "fp8": fp8, "schemas": schemas}[module]
                    stack.enter_context(patch.object(module, function, replacement))
                return (self.replaced_op(name) or schemas.IMPLEMENTATIONS[name])(*args, **kwargs)

        return call

    def replaced_op(self, name: str):
        """attention's functions are not ops themselves, those of the other two modules are."""
        return self.replacements.get(f"schemas__{name}") or self.replacements.get(f"cache__{name}")


def with_options(change):
    """paged_attention called with its named options changed; lse and out as they come."""

    def wrong(out, query, key_cache, value_cache, table, lens, starts, max_q, max_k, scale, **options):
        tensors, options = change((out, query, key_cache, value_cache, table, lens, starts), dict(options))
        options.setdefault("scale", scale)
        return paged_attention(*tensors, max_q, max_k, options.pop("scale"), **options)

    return wrong


def drop(*names):
    defaults = {"softcap": 0.0, "window_left": -1, "window_right": -1, "causal": True, "num_splits": 0}
    return with_options(lambda t, o: (t, o | {name: defaults.get(name) for name in names}))


def longer(tensors, options):
    out, query, key_cache, value_cache, table, lens, starts = tensors
    table = torch.where((table < 0) | (table >= key_cache.size(0)), 0, table)
    lens = torch.minimum(lens + 1, torch.tensor(table.size(1) * key_cache.size(1))) if table.numel() else lens
    return (out, query, key_cache, value_cache, table, lens.int(), starts), options


def scribble(write):
    """The right results, and a write where none belongs."""

    def wrong(out, *args, lse=None, **kwargs):
        paged_attention(out, *args, lse=lse, **kwargs)
        write(out, lse)

    return wrong


def past_the_end(out, lse):
    storage = torch.empty(0, dtype=out.dtype).set_(out.untyped_storage())
    if out.numel():
        storage[out.storage_offset() + sum((n - 1) * s for n, s in zip(out.shape, out.stride(), strict=True)) + 1] = 0


def wrong_attend(change):
    def wrong(query, keys, values, distance, scale, softcap, alibi_slopes, sinks):
        return attend(*change(query, keys, values, distance, scale, softcap, alibi_slopes, sinks))

    return wrong


def interleaved_heads(query, keys, values, distance, scale, softcap, alibi, sinks):
    ratio = query.size(0) // keys.size(1)
    return query, keys.repeat(1, ratio, 1), values.repeat(1, ratio, 1), distance, scale, softcap, alibi, sinks


def cap_before_scale(query, keys, values, distance, scale, softcap, alibi, sinks):
    return query, keys, values, distance, scale, softcap / scale if softcap else 0.0, alibi, sinks


def lse_in_base_2(*args):
    out, lse = attend(*args)
    return out, lse / torch.log(torch.tensor(2.0))


def bf16_weights(query, keys, values, *rest):
    return attend(query, keys, values.float().bfloat16().double() * (1 + 2**-7), *rest)


def zero_for_empty(*args):
    out, lse = attend(*args)
    return out, torch.where(lse.isinf(), 0.0, lse)


def sink_with_a_value(query, keys, values, distance, scale, softcap, alibi, sinks):
    out, lse = attend(query, keys, values, distance, scale, softcap, alibi, sinks)
    return (attend(query, keys, values, distance, scale, softcap, alibi, None)[0] if sinks is not None else out), lse


def top_left(query_pos, seq_len, causal, left, right):
    return live_range(min(query_pos, seq_len - 2), seq_len, causal, left, right)


def scalar_scale(scale, blocks, offsets):
    right = scale_at(scale, blocks, offsets)
    return right[..., :1].expand_as(right)


ATTENTION_MUTANTS = {
    "window one key too wide": dict(attention__live_range=lambda p, n, c, w, r: live_range(p, n, c, w + (w >= 0), r)),
    "window one key too narrow": dict(attention__live_range=lambda p, n, c, w, r: live_range(p, n, c, w - (w > 0), r)),
    "right window dropped": dict(schemas__paged_attention=drop("window_right")),
    "window dropped": dict(schemas__paged_attention=drop("window_left", "window_right")),
    "causal ignored": dict(attention__live_range=lambda p, n, c, w, r: live_range(p, n, False, w, r)),
    "always causal": dict(schemas__paged_attention=drop("causal")),
    "one position off": dict(attention__live_range=top_left),
    "one key too many": dict(schemas__paged_attention=with_options(longer)),
    "k_scale ignored": dict(schemas__paged_attention=drop("k_scale")),
    "v_scale ignored": dict(schemas__paged_attention=drop("v_scale")),
    "scales swapped": dict(schemas__paged_attention=with_options(
        lambda t, o: (t, o | {"k_scale": o.get("v_scale"), "v_scale": o.get("k_scale")}))),
    "per-head scale read as a scalar": dict(cache__scale_at=scalar_scale),
    "softcap dropped": dict(schemas__paged_attention=drop("softcap")),
    "softcap before scale": dict(attention__attend=wrong_attend(cap_before_scale)),
    "alibi dropped": dict(schemas__paged_attention=drop("alibi_slopes")),
    "alibi from absolute positions": dict(attention__attend=wrong_attend(
        lambda q, k, v, d, *rest: (q, k, v, d - d[:1], *rest))),
    "alibi one off": dict(attention__attend=wrong_attend(lambda q, k, v, d, *rest: (q, k, v, d - 1, *rest))),
    "alibi distance without its sign": dict(attention__attend=wrong_attend(
        lambda q, k, v, d, *rest: (q, k, v, d.abs(), *rest))),
    "sinks dropped": dict(schemas__paged_attention=drop("sinks")),
    "sink left out of the weights": dict(attention__attend=sink_with_a_value),
    "heads interleaved": dict(attention__attend=wrong_attend(interleaved_heads)),
    "lse in base 2": dict(attention__attend=lse_in_base_2),
    "lse 0 for no keys": dict(attention__attend=zero_for_empty),
    "values off by one bf16 step": dict(attention__attend=bf16_weights),
    "scale rounded to fp16": dict(schemas__paged_attention=with_options(
        lambda t, o: (t, o | {"scale": 1.01 * t[1].size(-1) ** -0.5}))),
    "lse not written": dict(schemas__paged_attention=drop("lse")),
    "padding row written": dict(schemas__paged_attention=scribble(lambda out, lse: out[-1:].fill_(0))),
    "written past the end": dict(schemas__paged_attention=scribble(past_the_end)),
    "query written": dict(schemas__paged_attention=lambda out, query, *a, **k: (
        paged_attention(out, query, *a, **k), query[:1].mul_(2))),
}  # fmt: skip


def truncate(values, dtype):
    """Toward zero instead of to the nearest."""
    byte = encode(values, dtype).view(torch.uint8).clone()
    over = fp8.decode(byte.view(dtype)).abs() > values.double().abs()
    return torch.where(over, byte - 1, byte).view(dtype)


def half_away(values, dtype):
    return encode(values.double() * (1 + 1e-9), dtype)


def nan_when_large(values, dtype):
    return encode(torch.where(values.abs() > fp8.fp8_max(dtype) * 1.04, float("nan"), values), dtype)


def by_reciprocal(store):
    def wrong(target, block, offset, row, scale):
        return store(target, block, offset, row.float() * (1 / scale.reshape(-1, 1)), torch.ones(1))

    return wrong


def next_slot(name, target, slots):
    return [
        (row, block, (offset + (row == 1)) % target.size(1)) for row, block, offset in live_slots(name, target, slots)
    ]


def skip_as_last(name, target, slots):
    count = target.size(0) * target.size(1)
    return live_slots(name, target, torch.where(slots < 0, count - 1, slots))


live_slots, store, dynamic_scale = cache.live_slots, cache.store, cache.dynamic_scale
WRITE_MUTANTS = {
    "FP8 truncated": dict(fp8__encode=truncate),
    "FP8 ties away from zero": dict(fp8__encode=half_away),
    "FP8 overflow to NaN": dict(fp8__encode=nan_when_large),
    "FP8 NaN to 0": dict(fp8__encode=lambda v, d: encode(v.nan_to_num(nan=0.0, posinf=1e30, neginf=-1e30), d)),
    "FP8 loses -0.0": dict(fp8__encode=lambda v, d: encode(torch.where(v == 0, 0.0, v), d)),
    "multiplied by the reciprocal": dict(cache__store=by_reciprocal(store)),
    "a slot off": dict(cache__live_slots=next_slot),
    "negative slots written at the end": dict(cache__live_slots=skip_as_last),
    "per-head scale read as a scalar": dict(cache__scale_at=scalar_scale),
    "key and value swapped": dict(cache__reshape_and_cache=lambda k, v, kc, vc, *rest: (
        reshape_and_cache(v, k, kc, vc, *rest))),
    "amax over NaN": dict(cache__dynamic_scale=lambda row, d: row.float().abs().amax(-1) / fp8.fp8_max(d)),
    "dynamic scale one ulp off": dict(cache__dynamic_scale=lambda row, d: (
        dynamic_scale(row, d).nextafter(torch.tensor(1.0)))),
    "halves for pairs": dict(cache__rotate=lambda row, p, cs, pairs: rotate(row, p, cs, not pairs)),
    "turned the other way": dict(cache__rotate=lambda row, p, cs, pairs: (
        rotate(row, p, torch.cat([cs[:, : cs.size(1) // 2], -cs[:, cs.size(1) // 2 :]], 1), pairs))),
    "a position off": dict(cache__rotate=lambda row, p, cs, pairs: rotate(row, max(p - 1, 0), cs, pairs)),
}  # fmt: skip
reshape_and_cache = cache.reshape_and_cache


def caught(judge, cases, mutant) -> bool:
    """Whether the judge rejects the mutant on at least one case. A mutant that crashes proves nothing: it fails."""
    for case in cases:
        try:
            judge(mutant, case)
        except (AssertionError, IndexError):  # IndexError: it followed a block id that must not be used
            return True
    return False


@pytest.mark.parametrize("name", ATTENTION_MUTANTS)
def test_wrong_attention_is_caught(name):
    # Small cases, those with most options first: they catch most mutants at once.
    cases = sorted(ATTENTION_CASES, key=lambda case: -bool(case.softcap) - case.alibi - case.sinks)
    cases = [case for case in cases if case.work < 300_000]
    assert caught(judge_attention, cases, Mutant(**ATTENTION_MUTANTS[name])), f"nothing catches: {name}"


@pytest.mark.parametrize("name", WRITE_MUTANTS)
def test_wrong_write_is_caught(name):
    mutant = Mutant(**WRITE_MUTANTS[name])
    assert caught(judge_write, WRITE_CASES[::-1], mutant), f"nothing catches: {name}"


def test_wrong_gather_is_caught():
    for wrong in (scalar_scale, lambda scale, *where: torch.ones(1, 1)):
        assert caught(judge_gather, GATHER_CASES[::-1], Mutant(cache__scale_at=wrong))


def merge_without_empties(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    parts = zip((out_a, out_b), (lse_a, lse_b), strict=True)
    return sum(out.double() * (part - lse).exp()[..., None] for out, part in parts), lse


def merge_rounded(out_a, lse_a, out_b, lse_b):
    out, lse = merge_attention_states(out_a, lse_a, out_b, lse_b)
    return out * (1 + 2.0**-8), lse


merge_attention_states = attention.merge_attention_states


@pytest.mark.parametrize("wrong", [merge_without_empties, merge_rounded])
def test_wrong_merge_is_caught(wrong):
    assert caught(judge_merge, MERGE_CASES, Mutant(attention__merge_attention_states=wrong))


def copy_reversed(keys, values, mapping):
    for target in map(cache.as_bytes, [*keys, *values]):
        target[mapping[:, 0]] = target[mapping[:, 1]]


def copy_keys_alone(keys, values, mapping):
    copy_blocks(keys, [], mapping)


copy_blocks, swap_blocks = cache.copy_blocks, cache.swap_blocks


@pytest.mark.parametrize("wrong", [copy_reversed, copy_keys_alone])
def test_wrong_copy_is_caught(wrong):
    assert caught(judge_move, [case for case in MOVE_CASES if case.op == "copy"], Mutant(cache__copy_blocks=wrong))


def test_wrong_swap_is_caught():
    mutant = Mutant(cache__swap_blocks=lambda source, target, mapping: swap_blocks(source, target, mapping[:-1]))
    assert caught(judge_move, [case for case in MOVE_CASES if case.op == "swap"], mutant)


@pytest.mark.parametrize(
    "judge,cases",
    [(judge_attention, ATTENTION_CASES[::-9]), (judge_write, WRITE_CASES[::-9]), (judge_gather, GATHER_CASES[::-9]),
     (judge_merge, MERGE_CASES[::-5]), (judge_move, MOVE_CASES[::-5])],
    ids=["attention", "write", "gather", "merge", "move"],
)  # fmt: skip
def test_the_reference_passes(judge, cases):
    for backend in (REFERENCE, Mutant()):
        for case in cases:
            judge(backend, case)
