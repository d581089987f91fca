"""Counters against kernels whose traffic can be counted by hand, and against a plain model on random patterns."""

import numpy as np
import pytest
from tensor_reference import ORDERS, aligned, load_params, module, order, pointers, registers

from pagedkern import vgpu

INDEX = """
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mad.lo.u32 %r3, %r1, %r2, %r0;
"""


def copy_kernel(words, stride=1):
    """Thread i moves `words` words from word i * stride * words of p0 to the same place of p1."""
    kind, register = {1: ("u32", "%r10"), 2: ("v2.u32", "{%r10,%r11}"), 4: ("v4.u32", "{%r10,%r11,%r12,%r13}")}[words]
    return module(
        load_params(2)
        + INDEX
        + f"  mul.wide.u32 %d5, %r3, {4 * stride * words};\n  add.s64 %d6, %d0, %d5;\n  add.s64 %d7, %d1, %d5;\n"
        + f"  ld.global.{kind} {register}, [%d6];\n  st.global.{kind} [%d7], {register};\n",
        params=pointers(2),
    )


@pytest.mark.parametrize("mode,seed", ORDERS)
@pytest.mark.parametrize("words", [1, 2, 4])
def test_coalesced_copy(words, mode, seed):
    """8 blocks of 4 warps: every warp moves 128 bytes per word, whole sectors only."""
    source, out = aligned(1024 * words, np.uint32), aligned(1024 * words, np.uint32)
    source[:] = np.arange(source.size)
    with order(mode, seed):
        report = copy_kernel(words).launch("k", 8, 128, [source, out])
    np.testing.assert_array_equal(out, source)
    for way in ("load", "store"):
        assert report[f"global_{way}_requests"] == 32
        assert report[f"global_{way}_sectors"] == 32 * 4 * words
        assert report[f"global_{way}_bytes"] == 4096 * words
    assert report["global_vector_requests"] == (64 if words == 4 else 0)
    assert report["global_vector_bytes"] == (2 * 16384 if words == 4 else 0)
    assert report["unique_global_read_bytes"] == report["unique_global_write_bytes"] == 4096 * words
    assert report["instructions_by_class"] == {
        "load_other": 2 * 32,
        "load_global": 32,
        "store_global": 32,
        "integer": 4 * 32,
        "move": 5 * 32,
        "control": 32,
    }
    assert report["warp_instructions"] == 14 * 32
    assert report["thread_instructions"] == 14 * 1024


def test_copy_off_by_four_bytes():
    """Every warp's 128 bytes straddle one sector more; the launch as a whole touches one more."""
    source, out = aligned(1025, np.uint32), aligned(1025, np.uint32)
    report = copy_kernel(1).launch("k", 8, 128, [source[1:], out[1:]])
    assert report["global_load_sectors"] == report["global_store_sectors"] == 32 * 5
    assert report["unique_global_read_bytes"] == report["unique_global_write_bytes"] == 4096 + 32


@pytest.mark.parametrize("stride,sectors", [(2, 8), (3, 12), (4, 16), (8, 32), (32, 32)])
def test_strided_copy(stride, sectors):
    source, out = aligned(256 * stride, np.uint32), aligned(256 * stride, np.uint32)
    report = copy_kernel(1, stride).launch("k", 2, 128, [source, out])
    assert report["global_load_requests"] == 8
    assert report["global_load_sectors"] == report["global_store_sectors"] == 8 * sectors
    assert report["global_load_bytes"] == 1024
    assert report["unique_global_read_bytes"] == 32 * 8 * sectors


def test_last_warp_and_predicated_lanes():
    """37 threads, of which 20 load: a full warp with 20 lanes on, and five lanes with nothing to do."""
    body = (
        load_params(2) + INDEX + "  setp.lt.u32 %p1, %r0, 20;\n  mul.wide.u32 %d5, %r0, 4;\n  add.s64 %d6, %d0, %d5;\n"
    )
    body += "  @%p1 ld.global.u32 %r10, [%d6];\n"
    source = aligned(64, np.uint32)
    report = module(body, params=pointers(2)).launch("k", 1, 37, [source, source])
    assert report["global_load_requests"] == 1
    assert report["global_load_bytes"] == 80
    assert report["global_load_sectors"] == 3
    assert report["warp_instructions"] == 2 * 13
    assert report["thread_instructions"] == 12 * 37 + 20
    assert list(report["executed_by_line"].values()) == [2] * 13


def test_unique_bytes_of_what_all_blocks_read():
    """Four blocks read the same kilobyte and write one word."""
    body = load_params(2) + INDEX + "  mul.wide.u32 %d5, %r0, 4;\n  add.s64 %d6, %d0, %d5;\n"
    body += "  ld.global.u32 %r10, [%d6];\n  st.global.u32 [%d1], %r2;\n"
    source, out = aligned(256, np.uint32), aligned(8, np.uint32)
    report = module(body, params=pointers(2)).launch("k", 4, 256, [source, out])
    assert report["global_load_bytes"] == 4 * 1024
    assert report["unique_global_read_bytes"] == 1024
    assert report["global_store_sectors"] == report["global_store_requests"] == 32
    assert report["global_store_bytes"] == 4 * 1024
    assert report["unique_global_write_bytes"] == 32


def transpose_kernel(pitch):
    """Block (32, 32): tile[y][x] = p0[y][x]; p1[y][x] = tile[x][y], rows of the tile `pitch` words long."""
    body = f"""
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, %tid.y;
  mov.u32 %r2, tile;
  mad.lo.u32 %r3, %r1, {4 * pitch}, %r2;
  mad.lo.u32 %r3, %r0, 4, %r3;
  mad.lo.u32 %r4, %r0, {4 * pitch}, %r2;
  mad.lo.u32 %r4, %r1, 4, %r4;
  mad.lo.u32 %r5, %r1, 32, %r0;
  mul.wide.u32 %d5, %r5, 4;
  add.s64 %d6, %d0, %d5;
  add.s64 %d7, %d1, %d5;
  ld.global.u32 %r10, [%d6];
  st.shared.u32 [%r3], %r10;
  bar.sync 0;
  ld.shared.u32 %r11, [%r4];
  st.global.u32 [%d7], %r11;
"""
    return module(load_params(2) + body, params=pointers(2), shared=f".shared .align 128 .b8 tile[{128 * pitch}];")


@pytest.mark.parametrize("mode,seed", ORDERS)
@pytest.mark.parametrize("pitch,wavefronts", [(32, 32), (33, 1), (34, 2), (36, 4), (40, 8)])
def test_transpose(pitch, wavefronts, mode, seed):
    source, out = aligned((32, 32), np.uint32), aligned((32, 32), np.uint32)
    source[...] = np.arange(1024).reshape(32, 32)
    with order(mode, seed):
        report = transpose_kernel(pitch).launch("k", 1, (32, 32), [source, out])
    np.testing.assert_array_equal(out, source.T)
    assert report["shared_store_wavefronts"] == 32
    assert report["shared_load_wavefronts"] == 32 * wavefronts
    assert report["shared_bank_conflicts"] == 32 * (wavefronts - 1)
    assert report["barriers"] == 1


@pytest.mark.parametrize("swizzled,wavefronts", [(False, 32), (True, 4)])
def test_ldmatrix(swizzled, wavefronts):
    """Rows of 128 bytes: all of a column of chunks lies in four banks, unless the chunk is XORed with the row."""
    swizzle = "  and.b32 %r4, %r0, 7;\n  shl.b32 %r4, %r4, 4;\n  xor.b32 %r3, %r3, %r4;\n" if swizzled else ""
    body = "  mov.u32 %r0, %tid.x;\n  mov.u32 %r1, tile;\n  mad.lo.u32 %r3, %r0, 128, %r1;\n" + swizzle
    body += "  mov.u32 %r5, 0;\n  st.shared.v4.u32 [%r3], {%r5,%r5,%r5,%r5};\n  bar.warp.sync 0xffffffff;\n"
    body += f"  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {registers('%r', 20, 4)}, [%r3];\n" * 3
    report = module(body, shared=".shared .align 128 .b8 tile[4096];").launch("k", 1, 32, [])
    assert report["shared_load_wavefronts"] == 3 * wavefronts
    assert report["shared_store_wavefronts"] == wavefronts
    assert report["shared_bank_conflicts"] == 4 * (wavefronts - 4)
    assert report["instructions_by_class"]["matrix_move"] == 3


@pytest.mark.parametrize("mode,seed", ORDERS)
@pytest.mark.parametrize("corner,inside", [((0, 0), 16 * 64), ((56, 32), 8 * 32), ((-8, 0), 8 * 64)])
def test_tma_load(corner, inside, mode, seed):
    """A box of 16 x 64 halves: all of it is written to shared memory, and only what lies in the tensor is read."""
    tensor = aligned((64, 64), np.float16)
    y, x = corner
    body = f"""
  mov.u32 %r0, %tid.x;
  setp.eq.u32 %p1, %r0, 0;
  mov.u32 %r1, tile;
  mov.u32 %r2, bar;
  mov.b64 %d3, m;
  cvta.param.u64 %d3, %d3;
  mov.u32 %r10, {x};
  mov.u32 %r11, {y};
  @%p1 mbarrier.init.shared.b64 [%r2], 1;
  fence.mbarrier_init.release.cluster;
  bar.sync 0;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 2048;
  @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d3, {{%r10, %r11}}], [%r2];
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0;
  @!%p3 bra WAIT;
"""
    shared = ".shared .align 128 .b8 tile[2048];\n.shared .align 8 .b64 bar;"
    kernel = module(body, params=".param .align 128 .b8 m[128]", shared=shared)
    with order(mode, seed):
        report = kernel.launch("k", 1, 128, [vgpu.tensor_map(tensor, (16, 64))])
    assert report["bulk_bytes"] == 2048
    assert report["unique_global_read_bytes"] == 2 * inside
    assert report["unique_global_write_bytes"] == 0
    assert report["global_load_requests"] == 0
    assert report["instructions_by_class"]["async_copy"] == 4


@pytest.mark.parametrize(
    "shape,types,a,b,c",
    [
        ((16, 8, 16), "f32.bf16.bf16.f32", 4, 2, 4),
        ((16, 8, 8), "f32.tf32.tf32.f32", 4, 2, 4),
        ((16, 8, 32), "f32.e4m3.e4m3.f32", 4, 2, 4),
        ((16, 8, 32), "s32.s8.s8.s32", 4, 2, 4),
    ],
)
def test_mma_loop(shape, types, a, b, c):
    """Three warps, ten rounds of two products."""
    m, n, k = shape
    body = "".join(f"  mov.u32 %r{10 + i}, 0;\n" for i in range(a + b + c)) + "  mov.u32 %r1, 0;\nAGAIN:\n"
    d = registers("%r", 10 + a + b, c)
    left, right = registers("%r", 10, a), registers("%r", 10 + a, b)
    mma = f"  mma.sync.aligned.m{m}n{n}k{k}.row.col.{types} {d}, {left}, {right}, {d};\n"
    body += 2 * mma + "  add.u32 %r1, %r1, 1;\n  setp.lt.u32 %p1, %r1, 10;\n  @%p1 bra AGAIN;\n"
    report = module(body).launch("k", 1, 96, [])
    assert report["tensor_flops"] == 3 * 10 * 2 * (2 * m * n * k)
    assert report["instructions_by_class"]["tensor_core"] == 60


def test_atomics_and_barriers():
    body = load_params(1) + "  mov.u32 %r1, 1;\n  red.global.add.u32 [%d0], %r1;\n  bar.sync 0;\n"
    body += "  atom.global.add.u32 %r2, [%d0+4], %r1;\n  bar.sync 0;\n"
    out = aligned(8, np.uint32)
    report = module(body, params=pointers(1)).launch("k", 3, 64, [out])
    assert out[:2].tolist() == [192, 192]
    assert report["atomics"] == 3 * 2 * 2
    assert report["barriers"] == 3 * 2
    assert report["global_load_bytes"] == report["global_store_bytes"] == 12 * 32 * 4
    assert report["unique_global_write_bytes"] == 32


def test_without_counters():
    source, out = aligned(1024, np.uint32), aligned(1024, np.uint32)
    with vgpu.session(counters=False):
        report = copy_kernel(1).launch("k", 8, 128, [source, out])
    traffic = [v for name, v in report.items() if name.startswith(("global", "unique", "shared"))]
    assert traffic and not any(traffic)
    assert report["warp_instructions"] == 14 * 32


# ---- random patterns against a plain model

WIDTHS = {4: ("u32", 1), 8: ("v2.u32", 2), 16: ("v4.u32", 4)}


def patterns(rng, words, width):
    """32 word addresses, multiples of the width: lane by lane, the same for all, shuffled, with strides, at random."""
    unit = width // 4
    lanes = np.arange(32)
    slots = words // unit
    yield lanes * unit
    yield np.full(32, rng.integers(slots)) * unit
    yield rng.permutation(32) * unit
    yield (lanes // 2) * unit
    yield (lanes[::-1] + rng.integers(slots - 32)) * unit
    for step in (2, 3, 5, 8):
        yield lanes * step % slots * unit
    for _ in range(6):
        yield rng.integers(0, slots, 32) * unit
    yield rng.integers(0, 4, 32) * unit


def model(words, active, width):
    """(sectors, wavefronts, fewest wavefronts) of one access."""
    spread = words[:, None] + np.arange(width // 4)
    sectors = len(np.unique(spread[active] // 8))
    group = 32 * 4 // width
    total = fewest = 0
    for first in range(0, 32, group):
        inside = active & (np.arange(32) // group == first // group)
        if inside.any():
            banks = np.unique(spread[inside]) % 32
            total += np.bincount(banks).max()
            fewest += 1
    return sectors, total, fewest


def access_kernel(width):
    """Every lane whose flag is set reads its address of p0 and of shared memory. Addresses are in bytes."""
    kind, count = WIDTHS[width]
    into = registers("%r", 20, count) if count > 1 else "%r20"
    body = f"""
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, tile;
  mov.u32 %r2, 0;
  mad.lo.u32 %r3, %r0, 16, %r1;
FILL:
  st.shared.v4.u32 [%r3], {{%r2,%r2,%r2,%r2}};
  add.u32 %r3, %r3, 512;
  add.u32 %r4, %r1, 4096;
  setp.lt.u32 %p1, %r3, %r4;
  @%p1 bra FILL;
  bar.warp.sync 0xffffffff;
  mul.wide.u32 %d5, %r0, 4;
  add.s64 %d6, %d1, %d5;
  ld.global.u32 %r5, [%d6];
  ld.global.u32 %r6, [%d6+128];
  setp.ne.u32 %p2, %r6, 0;
  add.u32 %r7, %r1, %r5;
  cvt.u64.u32 %d7, %r5;
  add.s64 %d7, %d0, %d7;
  @%p2 ld.shared.{kind} {into}, [%r7];
  @%p2 ld.global.{kind} {into}, [%d7];
"""
    return module(load_params(2) + body, params=pointers(2), shared=".shared .align 128 .b8 tile[4096];")


@pytest.mark.parametrize("width", WIDTHS)
def test_random_accesses(width):
    rng = np.random.default_rng(width)
    kernel, source = access_kernel(width), aligned(1024, np.uint32)
    fill, control = 8 * 4, 2
    for words in patterns(rng, 1024, width):
        for active in (np.ones(32, bool), rng.random(32) < 0.6):
            lanes = np.stack([words * 4, active]).astype(np.uint32)
            place = aligned((2, 32), np.uint32)
            place[...] = lanes
            report = kernel.launch("k", 1, 32, [source, place])
            sectors, wavefronts, fewest = model(words, active, width)
            assert report["shared_load_wavefronts"] == wavefronts, words
            assert report["shared_bank_conflicts"] == wavefronts - fewest, words
            assert report["shared_store_wavefronts"] == fill
            assert report["global_load_requests"] == control + bool(active.any())
            assert report["global_load_sectors"] == 4 * control + sectors, words
            assert report["global_load_bytes"] == 128 * control + int(active.sum()) * width
            assert report["global_vector_bytes"] == (int(active.sum()) * 16 if width == 16 else 0)
            assert report["unique_global_read_bytes"] == 32 * (4 * control + sectors)
