"""Run by test_guard_pages.py in a process of its own: a read or write out of bounds kills it.

Arguments: the backend and "end" or "start". Prints the case before each call.
"""

import sys
from dataclasses import replace

from pagedkern import reference
from pagedkern.testing import compare
from pagedkern.testing.backends import by_name
from pagedkern.testing.cache_cases import DYNAMIC, FP8, PLAIN, ROPE, GatherCase, WriteCase
from pagedkern.testing.cases import BF16, CHUNK, DECODE, E4M3, E5M2, FP16, FP32, MIXED, AttentionCase, sweep
from pagedkern.testing.guard_pages import between_guards
from pagedkern.testing.inputs import build_attention, live_keys
from pagedkern.testing.judge_cache import write_inputs

HEAD_DIMS = (8, 40, 64, 72, 120, 128, 200, 256)


def attention_cases() -> list[AttentionCase]:
    full_pages = replace(DECODE, name="full-pages", seq_lens=(16, 32, 64))
    exact = [replace(base, table_slack=0, padding_rows=0) for base in (DECODE, CHUNK, MIXED, full_pages)]
    cases = []
    for base in exact:
        for dtype, cache_dtype in ((BF16, None), (FP16, None), (FP32, None), (BF16, E4M3), (FP16, E5M2), (FP32, E4M3)):
            scales = ("head", "token") if cache_dtype else (None, None)
            case = replace(base, dtype=dtype, cache_dtype=cache_dtype, k_scale=scales[0], v_scale=scales[1])
            cases += sweep(case, dtype=(dtype,), cache_dtype=(cache_dtype,), head_dim=HEAD_DIMS)
        cases += sweep(base, cache_layout=("HND", "token_major", "odd", "mixed"), query_layout=("fused", "odd_stride"))
        cases += sweep(base, num_splits=(3,), cache_dtype=(None, E4M3), block_size=(1, 16, 64), alibi=(True,))
        cases += sweep(base, window=((9, -1), (0, 0)), causal=(True, False), sinks=(True,), heads=((7, 1), (9, 3)))
    return cases


def write_cases() -> list[WriteCase]:
    cases = []
    for base in (PLAIN, FP8, DYNAMIC, ROPE, replace(ROPE, name="rope-pairs", interleaved=True)):
        cases += sweep(base, dtype=(BF16, FP16, FP32), head_dim=HEAD_DIMS)
        cases += sweep(base, cache_layout=("HND", "odd", "token_major"), key_layout=("fused", "odd_stride"))
        cases += sweep(base, slots=("skips", "run"), slot_stride=(1, 2))
    return cases


def run_attention(backend, case: AttentionCase, at_end: bool) -> None:
    inputs = build_attention(case)
    # Cut down to the blocks in use, so that a live page ends (or begins) the allocation.
    used = [
        int(inputs.block_table[seq, position // case.block_size])
        for seq, keys in enumerate(live_keys(case))
        for position in keys
    ]
    blocks = slice(min(used, default=0), max(used, default=0) + 1)
    inputs.block_table.sub_(blocks.start)
    for name in ("k_scale", "v_scale"):
        scale = getattr(inputs, name)
        setattr(inputs, name, scale[blocks] if scale is not None and scale.dim() == 3 else scale)
    inputs.cache.key, inputs.cache.value = inputs.cache.key[blocks], inputs.cache.value[blocks]
    tensors = [inputs.query.view, inputs.cache.key, inputs.cache.value]
    query, key_cache, value_cache = (between_guards(tensor, at_end) for tensor in tensors)
    table, lens, starts = (
        between_guards(tensor, at_end) for tensor in (inputs.block_table, inputs.seq_lens, inputs.cu_seqlens_q)
    )
    options = inputs.options()
    for name in ("alibi_slopes", "sinks", "k_scale", "v_scale"):
        options[name] = between_guards(options[name], at_end)
    out, lse = between_guards(inputs.out.view, at_end), between_guards(inputs.lse.view, at_end)
    backend.op("paged_attention")(
        out, query, key_cache, value_cache, table, lens, starts, max(case.query_lens), max(case.seq_lens),
        options.pop("scale"), **options, lse=lse, num_splits=case.num_splits,
    )  # fmt: skip
    expected, expected_lse = inputs.reference()
    compare.assert_close(out, expected, case.dtype)
    compare.assert_lse_close(lse, expected_lse, case.stored_dtype.itemsize == 1)


def run_write(backend, case: WriteCase, at_end: bool) -> None:
    inputs = write_inputs(case, 0)
    # With fewer blocks than the slots could need, the last slot in use ends the cache.
    blocks = 1 + int(inputs["slots"].max()) // case.block_size
    key, value = (between_guards(inputs[name].view, at_end) for name in ("key", "value"))
    caches = [between_guards(cache[:blocks], at_end) for cache in (inputs["cache"].key, inputs["cache"].value)]
    slots = between_guards(inputs["slots"], at_end)
    scales = [between_guards(inputs[name], at_end) for name in ("k_scale", "v_scale")]
    if case.op == "rope":
        query = between_guards(inputs["query"].view, at_end)
        turn = [between_guards(inputs[name], at_end) for name in ("positions", "cos_sin")]
        backend.op("rope_reshape_and_cache")(query, key, value, *caches, *turn, slots, case.interleaved, *scales)
    elif case.op == "dynamic":
        scales = [scale[:blocks] for scale in scales]
        backend.op("reshape_and_cache_dynamic")(key, value, *caches, *scales, slots)
    else:
        scales = [s[:blocks] if s is not None and s.dim() == 3 else s for s in scales]
        backend.op("reshape_and_cache")(key, value, *caches, slots, *scales)


def run_gather(backend, case: GatherCase, at_end: bool) -> None:
    base = AttentionCase(
        case.name, case.seq_lens, case.seq_lens, heads=(case.kv_heads,) * 2, head_dim=case.head_dim, dtype=case.dtype,
        cache_dtype=case.cache_dtype, table_slack=0,
    )  # fmt: skip
    inputs = build_attention(base)
    caches = [between_guards(cache, at_end) for cache in (inputs.cache.key, inputs.cache.value)]
    lists = [between_guards(t, at_end) for t in (inputs.block_table, inputs.seq_lens, inputs.cu_seqlens_q)]
    key, value = between_guards(inputs.out.view, at_end), between_guards(inputs.query.view, at_end)
    wanted = [key.clone(), value.clone()]
    reference.gather_cache(*wanted, *caches, *lists)
    backend.op("gather_cache")(key, value, *caches, *lists)
    compare.assert_same_bytes(key, wanted[0], "key")
    compare.assert_same_bytes(value, wanted[1], "value")


def run_merge(backend, dtype, head_dim: int, at_end: bool) -> None:
    import torch

    parts = [between_guards(torch.randn(5, 3, head_dim).to(dtype), at_end) for _ in range(3)]
    lses = [between_guards(torch.randn(5, 3), at_end) for _ in range(3)]
    backend.op("merge_attention_states")(parts[0], lses[0], parts[1], lses[1], parts[2], lses[2])
    expected, _ = reference.merge_attention_states(parts[1], lses[1], parts[2], lses[2])
    compare.assert_close(parts[0], expected, dtype)


def main() -> None:
    backend, at_end = by_name(sys.argv[1]), sys.argv[2] == "end"
    for case in attention_cases():
        print(case, flush=True)
        run_attention(backend, case, at_end)
    for case in write_cases():
        print(case, flush=True)
        run_write(backend, case, at_end)
    for dtype in (BF16, FP16, FP32):
        for head_dim in HEAD_DIMS:
            for cache_dtype in (None, E4M3, E5M2):
                case = GatherCase("gather", (5, 16, 33), head_dim=head_dim, dtype=dtype, cache_dtype=cache_dtype)
                print(case, flush=True)
                run_gather(backend, case, at_end)
            print("merge", dtype, head_dim, flush=True)
            run_merge(backend, dtype, head_dim, at_end)
    print("all passed", flush=True)


if __name__ == "__main__":
    main()
