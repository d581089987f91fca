"""What the Triton kernels decide on the host, their refusals, and the case list in Triton's interpreter."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_args import MAKERS

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from bench import bench_triton_counters as counters  # noqa: E402
from bench import tune_triton  # noqa: E402
from bench.shapes import AttentionShape  # noqa: E402
from pagedkern.testing import triton_vgpu  # noqa: E402
from pagedkern.testing.backends import INTERPRETING, by_name  # noqa: E402
from pagedkern.triton_kernels import attention_plan as plans  # noqa: E402
from pagedkern.triton_kernels import common, copy_blocks, fp8, swap_blocks  # noqa: E402
from pagedkern.triton_kernels.register import KERNELS  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def interpreted(*command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(INTERPRETING, reason="needs a process that can compile; this one interprets")
def test_the_case_list_passes_in_the_interpreter():
    """A sample of the case list and the random cases; `TRITON_INTERPRET=1 pytest tests/ops --every-case` runs every
    test there is for it."""
    chosen = "triton_interpret and (test_case or test_random)"
    run = interpreted("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops", "-k", chosen)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout


@pytest.mark.parametrize("fault", ["dot", "cast", "widen"])
def test_the_interpreter_is_wrong_about_bfloat16(fault):
    """Why kernels round and multiply in other ways there: the smallest kernels that show it, right when compiled."""
    run = interpreted("tests/ops/interpreter_faults.py", fault)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "wrong"


@pytest.mark.parametrize("fault", ["dot", "cast", "widen"])
def test_compiled_bfloat16_is_right(fault):
    import interpreter_faults

    def launch(kernel, args, **constants):
        values = [constants[p.name] if p.is_constexpr else args.pop(0) for p in kernel.params]
        triton_vgpu.launch(kernel, (1,), values, [], {"num_warps": 1})

    assert interpreter_faults.verdict(fault, launch) == "right"


@triton.jit
def decode_kernel(stored, out, FORMAT: tl.constexpr, WAY: tl.constexpr):
    i = tl.arange(0, 256)
    if WAY == "pairs":
        pairs = tl.load(stored.to(tl.pointer_type(tl.int16), bitcast=True) + tl.arange(0, 128))
        tl.store(out + 2 * tl.arange(0, 128), fp8.decode_pairs(pairs, FORMAT, False))
        tl.store(out + 2 * tl.arange(0, 128) + 1, fp8.decode_pairs(pairs, FORMAT, True))
    else:
        tl.store(out + i, fp8.widen(tl.load(stored + i), FORMAT, WAY == "native"))


@pytest.mark.skipif(INTERPRETING, reason="needs a process that can compile; this one interprets")
@pytest.mark.parametrize("way", ["integers", "native", "pairs"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_fp8_code_is_decoded_exactly(dtype, way):
    codes, out = torch.arange(256).byte(), torch.zeros(256, dtype=torch.float16)
    form = fp8.format_of(codes.view(dtype))
    triton_vgpu.launch(decode_kernel, (1,), [codes, out, form, way], [], {"num_warps": 1})
    torch.testing.assert_close(out, codes.view(dtype).half(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit()[~out.isnan()], (codes > 127)[~out.isnan()])


def compiled_attention(shape: AttentionShape, itemsize: int):
    """The attention kernel that a call of this shape launches first; nothing is run."""
    kernels, args = [], tune_triton.inputs(shape, shape.head_dim, itemsize, "cpu")

    def compile_only(kernel, grid, values, by_address, options):
        kernels.append(triton_vgpu.compiled(kernel, values, options).kernel)

    with common.launcher(compile_only):
        torch.ops.pagedkern_triton.paged_attention(*args, num_splits=1)
    return kernels[0]


@pytest.mark.skipif(INTERPRETING, reason="needs a process that can compile; this one interprets")
@pytest.mark.parametrize("query", ["decode", "prefill"])
@pytest.mark.parametrize("itemsize,most", [(2, 45), (1, 95)])
def test_attention_does_not_spill_and_its_loop_stays_short(itemsize, most, query):
    """At head_dim 128: no spills, the shared memory planned for, and instructions of the main loop per KiB of KV."""
    shape = AttentionShape((1,), (4096,)) if query == "decode" else AttentionShape((128,), (512,))
    kernel, config = compiled_attention(shape, itemsize), plans.CONFIGS[128, itemsize]
    used, sizes = counters.usage(kernel.asm["cubin"]), (config, 128, itemsize)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    planned = plans.small_bytes(*sizes) if query == "decode" else plans.shared_bytes(*sizes)
    assert kernel.metadata.shared <= planned
    if query == "decode":
        kib = 2 * config.block_n * 128 * itemsize / 1024
        assert len(counters.main_loop(counters.cuobjdump(kernel.asm["cubin"], "-sass"))) * config.num_warps / kib < most


def lengths(rng: random.Random) -> tuple[list[int], list[int]]:
    q_lens = [rng.choice((0, 1, 1, 3, 16, 17, 90)) for _ in range(rng.choice((1, 3, 40)))]
    return q_lens, [rng.choice((0, 1, 63, 64, 500, 20000)) for _ in q_lens]


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_exceeds_what_the_host_planned_for(seed):
    """The device's arithmetic in Python: items and partial rows of random batches stay within the plan's bounds."""
    rng = random.Random(seed)
    (q_lens, seq_lens), num_splits = lengths(rng), rng.choice((0, 0, 1, 2, 7, 128))
    num_kv_heads, group, block_n = rng.choice((1, 2, 8)), rng.choice((1, 4, 7, 71)), 64
    chosen = plans.plan(
        sum(q_lens) + rng.choice((0, 5)), num_kv_heads * group, num_kv_heads, len(q_lens), max(q_lens),
        max(seq_lens) + rng.choice((0, 900)), num_splits, rng.choice((4, 132)), block_n,
    )  # fmt: skip
    blocks = [common.cdiv(k, block_n) if q else 0 for q, k in zip(q_lens, seq_lens, strict=True)]
    rows = [q * group for q in q_lens]
    tiles = [(r > 0) if r <= plans.SMALL_ROWS else common.cdiv(r, plans.LARGE_ROWS) for r in rows]
    total = sum(t * b for t, b in zip(tiles, blocks, strict=True))
    chunk = max(common.cdiv(total, chosen.target), plans.MIN_SPLIT_BLOCKS)
    items = partial_rows = 0
    for q_len, count, tile_count, row_count in zip(q_lens, blocks, tiles, rows, strict=True):
        each = common.cdiv(count, chosen.num_splits) if chosen.num_splits else chunk
        each = max(each, 1) if q_len <= plans.SPLIT_TOKENS else max(count, 1)
        splits = max(common.cdiv(count, each), 1)
        items += tile_count * splits
        partial_rows += row_count * splits if splits > 1 else 0
        assert chosen.has_large or row_count <= plans.SMALL_ROWS
        assert not chosen.direct or (splits == 1 and tile_count <= 1)
    assert items <= chosen.items
    assert partial_rows <= chosen.partial_rows


def test_a_plan_depends_on_upper_bounds_for_memory_alone():
    """What a row computes must not depend on max_seqlen_k: pinned splits stay as they are, however loose the bound."""
    tight, loose = (plans.plan(8, 32, 8, 8, 1, bound, 4, 132) for bound in (4096, 1 << 20))
    assert (tight.num_splits, tight.target) == (loose.num_splits, loose.target)


def test_a_small_workspace_means_fewer_splits_or_an_error():
    automatic = plans.plan(8, 32, 8, 8, 1, 100_000, 0, 132)
    whole = plans.partial_bytes(automatic.partial_rows, 8, 128)
    assert plans.fit(automatic, whole, 8, 128, 4) == automatic
    half = plans.fit(automatic, whole // 2, 8, 128, 4)
    assert half.target == automatic.target // 2 and plans.partial_bytes(half.partial_rows, 8, 128) <= whole // 2
    assert plans.fit(automatic, 0, 8, 128, 4).num_splits == 1
    pinned = plans.plan(8, 32, 8, 8, 1, 100_000, 4, 132)
    assert plans.fit(pinned, plans.partial_bytes(pinned.partial_rows, 8, 128) - 1, 8, 128, 4) is None


@pytest.mark.parametrize("shared_limit", [48 * 1024, 64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 256])
def test_config_fits_the_device(head_dim, itemsize, shared_limit):
    config = plans.config_of(head_dim, itemsize, shared_limit)
    assert config.block_n >= config.large_n >= 16 and config.block_n % config.large_n == 0
    assert plans.shared_bytes(config, head_dim, itemsize) <= shared_limit or config[1::2] == (16, 1)


def test_tuning_takes_the_fastest_candidate_that_fits():
    candidates = tune_triton.candidates(128, 2, 99 * 1024)
    assert candidates and all(plans.shared_bytes(c, 128, 2) <= 99 * 1024 for c in candidates)
    assert plans.CONFIGS[128, 2] in tune_triton.candidates(128, 2, 227 * 1024)
    times = {c: 1.0 + i for i, c in enumerate(candidates)}
    assert tune_triton.fastest([times, times]) == candidates[0]
    assert str(candidates[0].block_n) in tune_triton.as_table({(128, 2): candidates[0]})


def test_adjacent_pairs_are_one_transfer():
    pairs = [[3, 0], [4, 1], [5, 2], [9, 7], [8, 6], [10, 11]]
    assert swap_blocks.runs(pairs) == [(3, 0, 3), (9, 7, 1), (8, 6, 1), (10, 11, 1)]
    assert swap_blocks.runs([]) == []


@pytest.mark.parametrize(
    "strides,rows",
    [
        ((128, 64), (1, 1, 2048, 0, 0)),  # NHD
        ((64, 1024), (1, 1, 2048, 0, 0)),  # HND
        ((256, 128), (16, 2, 64, 256, 128)),  # K beside V
        ((64, 5000), (1, 2, 1024, 0, 5000)),
        ((500, 64), (16, 1, 128, 500, 0)),
    ],
)
def test_rows_that_are_neighbours_are_copied_as_one(strides, rows):
    assert copy_blocks.block_rows((16, 2, 64), strides) == rows


@pytest.mark.skipif(INTERPRETING, reason="needs a process that can compile; this one interprets")
@pytest.mark.parametrize("op", [function.__name__ for function in KERNELS])
def test_cpu_tensors_are_refused_where_nothing_runs_them(op):
    with pytest.raises(RuntimeError, match=rf"^{op}: tensors must be on a GPU .*got cpu"):
        getattr(torch.ops.pagedkern_triton, op)(**MAKERS[op]())


def test_a_workspace_for_the_op_library_serves_an_automatic_schedule():
    """And what the op library asks for pinned splits is enough, too."""
    backend, args = by_name("triton_interpret" if INTERPRETING else "triton_vgpu"), MAKERS["paged_attention"]()
    size = torch.ops.pagedkern.paged_attention_workspace_size(3, 4, 2, 16, 3, 1, 8, 0)
    args["workspace"] = torch.zeros(size, dtype=torch.uint8)
    backend.op("paged_attention")(**args)
    for splits in (1, 4, 16):
        sizes = (3, 4, 2, 16, 3, 1, 8, splits)
        need = torch.ops.pagedkern_triton.paged_attention_workspace_size(*sizes)
        assert torch.ops.pagedkern.paged_attention_workspace_size(*sizes) >= need


def test_compiled_once_for_every_size():
    """No batch size, length or pointer makes a kernel compile again."""
    if INTERPRETING:
        pytest.skip("needs a process that can compile; this one interprets")
    backend = by_name("triton_vgpu")
    counts = []
    for tokens in (1, 2, 16, 31):
        rows = torch.randn(tokens, 2, 64).bfloat16()
        caches = [torch.zeros(tokens, 16, 2, 64).bfloat16() for _ in range(2)]
        backend.op("reshape_and_cache")(rows, rows, *caches, torch.arange(tokens))
        counts.append(len(triton_vgpu._compiled))
    assert len(set(counts)) == 1
