"""Broken text and wild kernels: whatever they do, only Python exceptions come out.

Seeds are fixed. PAGEDKERN_FUZZ_SECONDS=600 goes on with fresh ones for that long, PAGEDKERN_FUZZ_CORPUS=DIR mutates the
.ptx files of a folder too; the seed of the running case is then in PAGEDKERN_FUZZ_LOG.
"""

import os
import pathlib
import random
import time

import numpy as np
import pytest
from forms_kernel import HEAD, lane_module
from fuzz_programs import ASYNC, CALLS, mutate, some_forms, wild_kernel

from pagedkern import vgpu

SECONDS = float(os.environ.get("PAGEDKERN_FUZZ_SECONDS", 0))
EXPECTED = (vgpu.ParseError, vgpu.LaunchError, vgpu.KernelFault)
BUDGET = 20_000


@pytest.fixture(scope="module")
def corpus():
    rng = random.Random(1)
    texts = [ASYNC, CALLS, *(lane_module(some_forms(rng, 6))[0] for _ in range(20))]
    folder = os.environ.get("PAGEDKERN_FUZZ_CORPUS")
    if folder:
        texts += [p.read_text() for p in sorted(pathlib.Path(folder).glob("*.ptx")) if p.stat().st_size < 60_000]
    for text in texts[:22]:
        vgpu.Module(text)  # the start is right
    return texts


def launch(module, rng):
    """Every kernel on arguments that may be memory, addresses or noise."""
    for name in module.kernels:
        args, memory = [], [np.zeros(4096, np.uint64)]
        for _, _, size, _ in module._program.params(name)[:40]:
            if size == 8 and rng.random() < 0.9:
                args.append(np.frombuffer(rng.randbytes(16384), np.uint64).copy())
            else:
                args.append(rng.randbytes(size))
        if len(args) != len(module._program.params(name)):
            continue
        grid, block = rng.choice((1, 1, 2, 4)), rng.choice((1, 31, 32, 64, 64, 128, 128, 307))
        checks = rng.choice(("all", "all", "none", ("uninitialized",), ("races", "async"), ("barriers",)))
        mode = rng.choice(("early", "late", "random"))
        with vgpu.session(
            seed=rng.randrange(4),
            async_completion=mode,
            checks=checks,
            counters=rng.random() < 0.5,
            max_warp_instructions=BUDGET,
            threads=1,
        ):
            try:
                cluster = rng.choice((1, 1, grid))
                module.launch(name, grid, block, args, rng.choice((0, 0, 1024)), (cluster, 1, 1), memory)
            except EXPECTED:
                pass


def attempt(text, rng):
    try:
        module = vgpu.Module(text)
    except EXPECTED:
        return False
    launch(module, rng)
    return True


def cases(count):
    """Fixed seeds, then fresh ones while there is time."""
    yield from range(count)
    end = time.monotonic() + SECONDS / 2
    log = os.environ.get("PAGEDKERN_FUZZ_LOG")
    seed = int.from_bytes(os.urandom(6), "little")
    while time.monotonic() < end:
        seed += 1
        if log:
            pathlib.Path(log).write_text(str(seed))
        yield seed


def test_mutated_text(corpus):
    parsed = 0
    for seed in cases(1200):
        rng = random.Random(f"text {seed}")
        parsed += attempt(mutate(rng.choice(corpus), corpus, rng), rng)
    assert parsed > 100  # the mutations are no mere noise


def test_random_bytes():
    for seed in range(300):
        rng = random.Random(f"bytes {seed}")
        noise = rng.randbytes(rng.randint(0, 200)).decode("latin-1")
        attempt(rng.choice(("", HEAD, HEAD + ".visible .entry k() {\n")) + noise, rng)


def test_wild_kernels():
    parsed = 0
    for seed in cases(300):
        rng = random.Random(f"kernel {seed}")
        parsed += attempt(wild_kernel(rng), rng)
    assert parsed > 100


BIG = "9" * 30


@pytest.mark.parametrize(
    "text",
    [
        ".shared .b8 a[2000000000];\n.entry k() { .reg .b32 r; mov.u32 r, a; ret; }",
        ".entry k() { .shared .b8 a[200000]; .shared .b8 b[200000]; ret; }",
        ".entry k() { .local .b8 a[1073741824]; .local .b8 b[1073741824]; .local .b8 c[1073741824]; ret; }",
        ".entry k() { .local .b8 a[1073741824], b[1073741824], c[1073741824], d[1073741824], e[64]; ret; }",
        ".entry k(.param .b8 a[1073741824], .param .b8 b[1073741824]) { ret; }",
        "".join(f".global .b8 a{k}[1000000000];\n" for k in range(100)),
        f".global .b8 a[{BIG}];",
        ".global .b64 a[65536][65536][65536];",
        ".entry k() { .reg .b32 r<4294967295>; ret; }",
        f".entry k() {{ .reg .b32 r; mov.u32 r, {BIG}; ret; }}",
        ".entry k() " + "{" * 100_000,
        ".entry k() { .reg .b32 r; mov.b32 r, " + "{" * 100_000,
        ".entry k() { .reg .b32 r; mov.b32 r, " + "!" * 100_000 + "r; }",
        ".entry k() { .reg .b32 r; mov.b32 r, r" + "|r" * 100_000 + "; }",
        ".global .b32 a[] = " + "{" * 100_000,
        "".join(f".func f{k + 1}() {{ call f{k}; ret; }}\n" for k in range(50_000))
        + ".entry k() { call f50000; ret; } .func f0() { ret; }",
        ".entry k() { .align 1048576 .shared .b8 a[4]; ret; }",
        ".entry k() { .shared .align 1048576 .b8 a[4]; .shared .align 1048576 .b8 b[4]; ret; }",
        ".entry k() .maxnreg 99999999999 { ret; }",
        ".entry k() { bar.sync " + "-" * 1000 + "1; }",
    ],
    ids=range(20),
)
def test_huge_wishes(text):
    """Clean errors, at once and without the memory."""
    start = time.monotonic()
    attempt(HEAD + text, random.Random(0))
    assert time.monotonic() - start < 30
