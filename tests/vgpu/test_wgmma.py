"""wgmma: every form, both majors, every swizzle; and what must be caught around it."""

import numpy as np
import pytest
from tensor_reference import (
    ORDERS,
    SIZE,
    a_fragment,
    accumulator_fragment,
    from_accumulator,
    k_ordered,
    load_params,
    load_words,
    module,
    order,
    pointers,
    random_matrix,
    raw_bytes,
    registers,
    store_words,
)

from pagedkern import vgpu

SHARED_BYTES = 48 * 1024
SHARED = f".shared .align 1024 .b8 tile[{SHARED_BYTES}];"
A_AT, B_AT = 0, 16 * 1024
SPAN = {0: 16, 32: 32, 64: 64, 128: 128}  # bytes of a row of the swizzle's pattern
CODE = {0: 0, 128: 1, 64: 2, 32: 3}  # bits 62-63 of the descriptor


def types():
    """(d, a, b) of every form."""
    out = [("f16", "f16", "f16"), ("f32", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32")]
    fp8, int8 = ("e4m3", "e5m2"), ("s8", "u8")
    out += [(d, a, b) for d in ("f16", "f32") for a in fp8 for b in fp8]
    return out + [("s32", a, b) for a in int8 for b in int8]


def columns(d):
    return [n for n in range(8, 257, 8) if d != "s32" or n in (8, 24) or n % 16 == 0]


class Operand:
    """A matrix [mn, k] and how it lies in shared memory (canonical layouts of the PTX ISA)."""

    def __init__(self, kind, values, at, *, mn_major=False, swizzle=0):
        self.at, self.mn_major, self.swizzle = at, mn_major, swizzle
        self.raw = raw_bytes(kind, values)
        mn, k, size = self.raw.shape
        span, self.t = SPAN[swizzle], 16 // size
        if mn_major:
            blocks = -(-mn * size // span)
            # next block of mn, next eight k; without swizzle the descriptor's offsets trade places
            self.block_step, self.k_step = 8 * span, 8 * span * blocks
            self.lbo, self.sbo = (self.k_step, self.block_step) if swizzle == 0 else (self.block_step, self.k_step)
        else:
            self.lbo, self.sbo = (128 * (mn // 8) if swizzle == 0 else 16), 8 * span

    def place(self, image):
        mn, k, size = self.raw.shape
        i, j = np.meshgrid(np.arange(mn), np.arange(k), indexing="ij")
        span, t = SPAN[self.swizzle], self.t
        if self.mn_major:
            w = span // 16
            offset = (
                i % t * size + i // t % w * 16 + i // (t * w) * self.block_step + j % 8 * span + j // 8 * self.k_step
            )
        else:
            step = self.lbo if self.swizzle == 0 else 16
            offset = i % 8 * span + i // 8 * self.sbo + j % t * size + j // t * step
        address = self.at + offset
        rows = {0: 0, 32: 1, 64: 3, 128: 7}[self.swizzle]
        address ^= (address >> 7 & rows) << 4
        image[address[..., None] + np.arange(size)] = self.raw

    def descriptor(self):
        """PTX: the value without the start address."""
        return self.lbo >> 4 << 16 | self.sbo >> 4 << 32 | CODE[self.swizzle] << 62


LOAD_IMAGE = f"""
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, tile;
  shl.b32 %r2, %r0, 4;
  add.u32 %r3, %r1, %r2;
  cvt.u64.u32 %d50, %r2;
  add.s64 %d51, %d0, %d50;
  mov.u32 %r4, 0;
FILL:
  ld.global.v4.u32 {{%r5,%r6,%r7,%r8}}, [%d51];
  st.shared.v4.u32 [%r3], {{%r5,%r6,%r7,%r8}};
  add.s64 %d51, %d51, 2048;
  add.u32 %r3, %r3, 2048;
  add.u32 %r4, %r4, 2048;
  setp.lt.u32 %p0, %r4, {SHARED_BYTES};
  @%p0 bra FILL;
"""
PUBLISH = "  fence.proxy.async;\n  bar.sync 0;\n"
WAIT = "  wgmma.commit_group.sync.aligned;\n  wgmma.wait_group.sync.aligned 0;\n"


def descriptor(register, at, value):
    return f"""
  add.u32 %r9, %r1, {at};
  shr.u32 %r9, %r9, 4;
  cvt.u64.u32 %d52, %r9;
  or.b64 {register}, %d52, {value};
"""


def mma(d, a, b, n, *, a_regs=None, scale="%p1", ia=1, ib=1, ta=0, tb=0, saturate=""):
    k = 32 // SIZE[a]
    count = n // 4 if d == "f16" else n // 2
    text = f"  wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{a}.{b}{saturate} {registers('%r', 100, count)}, "
    text += f"{a_regs or '%d10'}, %d11, {scale}"
    if d != "s32":
        text += f", {ia}, {ib}"
    if SIZE[a] == 2:
        text += f", {tb}" if a_regs else f", {ta}, {tb}"
    return text + ";\n"


def kernel(d, a, b, n, left, right, *, in_registers=False, publish=PUBLISH, wait=WAIT, fence=True, extra="", **options):
    """p0 the image, p1 the accumulators in and out, p2 A's registers."""
    count = n // 4 if d == "f16" else n // 2
    body = load_params(3) + LOAD_IMAGE + publish
    body += descriptor("%d10", A_AT, left.descriptor()) + descriptor("%d11", B_AT, right.descriptor())
    body += load_words("%d1", 100, count, stride=128) + "  setp.eq.u32 %p1, 0, 0;\n"
    if in_registers:
        body += load_words("%d2", 20, 4, stride=128)
        options["a_regs"] = "{%r20,%r21,%r22,%r23}"
    body += "  wgmma.fence.sync.aligned;\n" if fence else ""
    body += mma(d, a, b, n, ta=int(left.mn_major), tb=int(right.mn_major), **options) + extra + wait
    return module(body + store_words("%d1", 100, count, stride=128), params=pointers(3), shared=SHARED)


def problem(d, a, b, n, *, seed=0, ta=False, tb=False, swizzle=128):
    rng = np.random.default_rng(seed)
    k = 32 // SIZE[a]
    x, y = random_matrix(rng, a, (64, k)), random_matrix(rng, b, (k, n))
    if d == "s32":
        start = rng.integers(-1000, 1000, (64, n)).astype(np.float64)
    else:
        start = rng.standard_normal((64, n)).astype(np.float16).astype(np.float64)
    left = Operand(a, x, A_AT, mn_major=ta, swizzle=swizzle if not ta or 64 * SIZE[a] >= swizzle else 0)
    usable = swizzle if not tb or n * SIZE[b] % max(swizzle, 1) == 0 else 0
    right = Operand(b, y.T, B_AT, mn_major=tb, swizzle=usable)
    image = np.zeros(SHARED_BYTES, np.uint8)
    left.place(image)
    right.place(image)
    words = np.concatenate([accumulator_fragment(d, start[16 * w : 16 * w + 16]) for w in range(4)], 1)
    fragments = np.concatenate([a_fragment(a, x[16 * w : 16 * w + 16]) for w in range(4)], 1)
    return x, y, start, left, right, image, np.ascontiguousarray(words), np.ascontiguousarray(fragments)


def result(d, words, n):
    parts = [np.ascontiguousarray(words[:, 32 * w : 32 * w + 32]) for w in range(4)]
    return np.concatenate([from_accumulator(d, p, n) for p in parts])


def check(d, a, b, n, *, in_registers=False, saturate="", ia=1, ib=1, **layout):
    x, y, start, left, right, image, words, fragments = problem(d, a, b, n, seed=n, **layout)
    if saturate:
        start = start + (2**31 - 1500)
        words = np.ascontiguousarray(
            np.concatenate([accumulator_fragment(d, start[16 * w : 16 * w + 16]) for w in range(4)], 1)
        )
    run = kernel(d, a, b, n, left, right, in_registers=in_registers, saturate=saturate, ia=ia, ib=ib)
    report = run.launch("k", 1, 128, [image, words, fragments])
    np.testing.assert_array_equal(result(d, words, n), k_ordered(x * ia, y * ib, start, d, bool(saturate)))
    assert report["tensor_flops"] == 2 * 64 * n * x.shape[1]


@pytest.mark.parametrize("d,a,b", types())
def test_every_shape(d, a, b):
    for n in columns(d):
        check(d, a, b, n, in_registers=n % 16 == 0)
        if d == "s32":
            check(d, a, b, n, saturate=".satfinite")


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("d,a", [("f32", "bf16"), ("f16", "f16"), ("f32", "tf32"), ("f32", "e4m3"), ("s32", "s8")])
def test_layouts(d, a, swizzle):
    for n in (8, 64, 128, 192):
        for ta in (False, True) if SIZE[a] == 2 else (False,):
            for tb in (False, True) if SIZE[a] == 2 else (False,):
                check(d, a, a, n, swizzle=swizzle, ta=ta, tb=tb)
                if not ta:
                    check(d, a, a, n, swizzle=swizzle, tb=tb, in_registers=True)


@pytest.mark.parametrize("ia,ib", [(1, -1), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("a", ["bf16", "tf32", "e5m2"])
def test_scales(a, ia, ib):
    check("f32", a, a, 32, ia=ia, ib=ib)
    check("f32", a, a, 32, ia=ia, ib=ib, in_registers=True)


def test_scale_d_off_reads_no_accumulator():
    x, y, start, left, right, image, words, fragments = problem("f32", "bf16", "bf16", 16)
    body = load_params(2) + LOAD_IMAGE + PUBLISH
    body += descriptor("%d10", A_AT, left.descriptor()) + descriptor("%d11", B_AT, right.descriptor())
    body += "  wgmma.fence.sync.aligned;\n" + mma("f32", "bf16", "bf16", 16, scale="0") + WAIT
    run = module(body + store_words("%d1", 100, 8, stride=128), params=pointers(2), shared=SHARED)
    run.launch("k", 1, 128, [image, words])
    np.testing.assert_array_equal(result("f32", words, 16), k_ordered(x, y, 0 * start, "f32"))
    read = module(body.replace(", 0, 1, 1, 0, 0;", ", 1, 1, 1, 0, 0;"), params=pointers(2), shared=SHARED)
    with pytest.raises(vgpu.KernelFault, match="before anything wrote it"):
        read.launch("k", 1, 128, [image, words])


@pytest.mark.parametrize("base", [0, 128, 256])
def test_base_offset(base):
    """A pattern that does not start on its own boundary says so in the descriptor."""
    rng = np.random.default_rng(5)
    x, y = random_matrix(rng, "bf16", (64, 16)), random_matrix(rng, "bf16", (16, 8))
    image = np.zeros(SHARED_BYTES, np.uint8)
    left, right = Operand("bf16", x, A_AT, swizzle=128), Operand("bf16", y.T, B_AT, swizzle=128)
    left.place(image)
    aligned = np.zeros(SHARED_BYTES, np.uint8)
    right.place(aligned)
    image[B_AT + base : B_AT + base + 1024] = aligned[B_AT : B_AT + 1024]
    words = np.zeros((4, 128), np.uint32)
    body = load_params(2) + LOAD_IMAGE + PUBLISH + descriptor("%d10", A_AT, left.descriptor())
    body += descriptor("%d11", B_AT + base, right.descriptor() | base >> 7 << 49)
    body += "  wgmma.fence.sync.aligned;\n" + mma("f32", "bf16", "bf16", 8, scale="0") + WAIT
    module(body + store_words("%d1", 100, 4, stride=128), params=pointers(2), shared=SHARED).launch(
        "k", 1, 128, [image, words]
    )
    np.testing.assert_array_equal(result("f32", words, 8), k_ordered(x, y, np.zeros((64, 8)), "f32"))


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_chain_and_groups(mode, seed):
    """Three mmas on one accumulator in three groups, waited for one by one."""
    x, y, start, left, right, image, words, fragments = problem("f32", "bf16", "bf16", 64)
    chain = "  wgmma.commit_group.sync.aligned;\n" + mma("f32", "bf16", "bf16", 64)
    chain += "  wgmma.commit_group.sync.aligned;\n" + mma("f32", "bf16", "bf16", 64, ia=-1)
    wait = "  wgmma.commit_group.sync.aligned;\n" + "".join(
        f"  wgmma.wait_group.sync.aligned {k};\n" for k in (2, 1, 0)
    )
    run = kernel("f32", "bf16", "bf16", 64, left, right, extra=chain, wait=wait)
    with order(mode, seed):
        run.launch("k", 1, 128, [image, words, fragments])
    want = k_ordered(x, y, start, "f32")
    want = k_ordered(-x, y, k_ordered(x, y, want, "f32"), "f32")
    np.testing.assert_array_equal(result("f32", words, 64), want)


FAULTS = {
    "read before the wait": (dict(extra="  add.u32 %r50, %r100, 0;\n"), "async", "is read while"),
    "written before the wait": (dict(extra="  mov.u32 %r101, 0;\n"), "async", "is written while"),
    "stored before the wait": (dict(wait=""), "async", "is read while"),
    "group never committed": (dict(wait="  wgmma.wait_group.sync.aligned 0;\n"), "async", "is read while"),
    "waited for too few groups": (dict(wait=WAIT.replace("aligned 0", "aligned 1")), "async", "is read while"),
    "no wgmma.fence": (dict(fence=False), "async", "since the last wgmma.fence"),
    "no proxy fence": (dict(publish="  bar.sync 0;\n"), "async", "no fence.proxy.async"),
    "no barrier": (dict(publish="  fence.proxy.async;\n"), "async", "may still read"),
    "A overwritten": (dict(in_registers=True, extra="  mov.u32 %r21, 0;\n"), "async", "is written while"),
    "B overwritten": (dict(extra="  bar.sync 0;\n  st.shared.u32 [%r1+16384], %r0;\n"), "async", "may still read"),
}


@pytest.mark.parametrize("mode", ["late", "random"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name, mode):
    options, kind, text = FAULTS[name]
    x, y, start, left, right, image, words, fragments = problem("f32", "bf16", "bf16", 16)
    run = kernel("f32", "bf16", "bf16", 16, left, right, **options)
    settings = dict(async_completion="late" if name == "B overwritten" else mode, checks=("races", "async", "barriers"))
    with vgpu.session(**settings), pytest.raises(vgpu.KernelFault) as caught:
        run.launch("k", 1, 128, [image, words, fragments])
    assert caught.value.kind == kind
    assert text in str(caught.value)
    assert "PTX line" in str(caught.value)


@pytest.mark.parametrize("mode,seed", ORDERS)
@pytest.mark.parametrize("in_registers", [False, True])
def test_mended_twin(mode, seed, in_registers):
    x, y, start, left, right, image, words, fragments = problem("f32", "bf16", "bf16", 16)
    run = kernel("f32", "bf16", "bf16", 16, left, right, in_registers=in_registers)
    with order(mode, seed):
        run.launch("k", 1, 128, [image, words, fragments])
    np.testing.assert_array_equal(result("f32", words, 16), k_ordered(x, y, start, "f32"))


def test_warpgroup_needs_four_warps():
    x, y, start, left, right, image, words, fragments = problem("f32", "bf16", "bf16", 16)
    run = kernel("f32", "bf16", "bf16", 16, left, right, publish="  bar.sync 0;\n  fence.proxy.async;\n")
    with pytest.raises(vgpu.KernelFault, match="warpgroup"):
        run.launch("k", 1, 96, [image, words, fragments])


@pytest.mark.parametrize(
    "text,reason",
    [
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3}, %d0, %d1, 1, 1, 1, 0, 0;",
            "D has the wrong",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, %d0, %d1, 1, 2, 1, 0, 0;",
            "imm-scale-a",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, %d0, %d1, 1, 1, 1;",
            "number of operands",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%r1}, %d0, %d1, 1, 1, 1, 0, 0;",
            "unsupported instruction",
        ),
        ("wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {%r1}, %d0, %d1, %r1, 0, 1;", "wgmma.mma_async.sp"),
    ],
)
def test_refused_before_the_launch(text, reason):
    with pytest.raises(vgpu.ParseError, match=reason):
        module("  " + text + "\n")


# ---- a ring of one stage: warps 0-3 multiply, warp 4 loads with bulk copies ----

RING_SHARED = ".shared .align 1024 .b8 tile[18432];\n.shared .align 8 .b64 bar[2];"
RING = """
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, tile;
  mov.u32 %r2, bar;
  setp.eq.u32 %p1, %r0, 0;
  @%p1 mbarrier.init.shared.b64 [%r2], 1;
  @%p1 mbarrier.init.shared.b64 [%r2+8], 1;
  bar.sync 0;
  mov.u32 %r3, 0;
  setp.ge.u32 %p2, %r0, 128;
  @!%p2 bra CONSUME;
  setp.eq.u32 %p3, %r0, 128;
PRODUCE:
  and.b32 %r4, %r3, 1;
  xor.b32 %r5, %r4, 1;
EMPTY:
  mbarrier.try_wait.parity.shared.b64 %p4, [%r2+8], %r5;
  @!%p4 bra EMPTY;
  @%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 18432;
  @%p3 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d0], 18432, [%r2];
  add.s64 %d0, %d0, 18432;
  add.u32 %r3, %r3, 1;
  setp.lt.u32 %p5, %r3, 4;
  @%p5 bra PRODUCE;
  ret;
CONSUME:
"""
TURN = """
TURN:
  and.b32 %r4, %r3, 1;
FULL:
  mbarrier.try_wait.parity.shared.b64 %p4, [%r2], %r4;
  @!%p4 bra FULL;
  wgmma.fence.sync.aligned;
{mma}
  wgmma.commit_group.sync.aligned;
{release}
  add.u32 %r3, %r3, 1;
  setp.lt.u32 %p5, %r3, 4;
  @%p5 bra TURN;
"""
RELEASE = (
    "  setp.eq.u32 %p6, %r0, 37;\n  @%p6 mbarrier.arrive.shared.b64 _, [%r2+8];\n"  # one thread for all four warps
)
FINISH = "  wgmma.wait_group.sync.aligned 0;\n"


def ring(release):
    rng = np.random.default_rng(8)
    x = [random_matrix(rng, "bf16", (64, 16)) for _ in range(4)]
    y = [random_matrix(rng, "bf16", (16, 64)) for _ in range(4)]
    images, total = np.zeros((4, 18432), np.uint8), np.zeros((64, 64))
    for image, left, right in zip(images, x, y, strict=True):
        a, b = Operand("bf16", left, 0, swizzle=128), Operand("bf16", right.T, 8192, swizzle=128)
        a.place(image)
        b.place(image)
        total = k_ordered(left, right, total, "f32").astype(np.float64)
    body = load_params(2) + RING + descriptor("%d10", 0, a.descriptor()) + descriptor("%d11", 8192, b.descriptor())
    body += "".join(f"  mov.b32 %r{100 + k}, 0;\n" for k in range(32)) + "  setp.eq.u32 %p1, 0, 0;\n"
    body += TURN.format(mma=mma("f32", "bf16", "bf16", 64), release=release)
    run = module(body + store_words("%d1", 100, 32, stride=128), params=pointers(2), shared=RING_SHARED)
    return run, images, total


@pytest.mark.parametrize("mode,seed", ORDERS + [("late", 7), ("random", 8), ("random", 9)])
def test_one_thread_releases_what_four_warps_read(mode, seed):
    """A warpgroup's wgmma is one operation: after the wait of any warp, no warp reads the operands any more."""
    run, images, total = ring(FINISH + RELEASE)
    words = np.zeros((32, 128), np.uint32)
    with order(mode, seed):
        run.launch("k", 1, 160, [images, words])
    np.testing.assert_array_equal(result("f32", words, 64), total.astype(np.float32))


@pytest.mark.parametrize("mode", ["late", "early", "random"])
def test_release_before_the_wait_is_caught(mode):
    run, images, _ = ring(RELEASE + FINISH)
    with (
        vgpu.session(async_completion=mode),
        pytest.raises(vgpu.KernelFault, match="may still read|races with a read by wgmma"),
    ):
        run.launch("k", 1, 160, [images, np.zeros((32, 128), np.uint32)])


def test_a_warp_that_stays_away_deadlocks_by_name():
    x, y, start, left, right, image, words, fragments = problem("f32", "bf16", "bf16", 16)
    body = load_params(2) + LOAD_IMAGE + PUBLISH + "  setp.ge.u32 %p2, %r0, 96;\n  @%p2 bra STAY;\n"
    body += descriptor("%d10", A_AT, left.descriptor()) + descriptor("%d11", B_AT, right.descriptor())
    body += "  wgmma.fence.sync.aligned;\n" + mma("f32", "bf16", "bf16", 16, scale="0") + WAIT
    body += store_words("%d1", 100, 8, stride=128) + "  ret;\nSTAY:\n  bra STAY;\n"
    run = module(body.replace("  bra STAY;\n", "  bar.sync 1, 64;\n"), params=pointers(2), shared=SHARED)
    with pytest.raises(vgpu.KernelFault, match="the other warps of its warpgroup") as caught:
        run.launch("k", 1, 128, [image, words])
    assert caught.value.kind == "deadlock"
