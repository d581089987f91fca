"""Kernels of tensor copies, and what they must do as a box walk in numpy."""

import numpy as np
from tensor_reference import aligned, load_params, module, pointers

from pagedkern import vgpu

TILE = 32768
SHARED = f".shared .align 1024 .b8 tile[{TILE}];\n.shared .align 128 .b8 map[128];\n.shared .align 8 .b64 bar;"
COUNTED = ".mbarrier::complete_tx::bytes"


# ---- the model ----


def walk(shape, box, coordinates, steps):
    """Indices of the box's elements per dimension, in the tensor's order (innermost last)."""
    counts = [b if d == len(box) - 1 else -(-b // s) for d, (b, s) in enumerate(zip(box, steps, strict=True))]
    per = [
        c + np.arange(n) * (1 if d == len(box) - 1 else s)
        for d, (c, n, s) in enumerate(zip(coordinates, counts, steps, strict=True))
    ]
    grid = np.meshgrid(*per, indexing="ij")
    inside = np.ones(grid[0].shape, bool)
    for g, n in zip(grid, shape, strict=True):
        inside &= (g >= 0) & (g < n)
    return grid, inside


def box_of(tensor, box, coordinates, steps=None, fill=0):
    """What a load brings, as the packed box."""
    grid, inside = walk(tensor.shape, box, coordinates, steps or [1] * len(box))
    clipped = [np.where(inside, g, 0) for g in grid]
    out = tensor[tuple(clipped)].copy()
    out[~inside] = fill
    return out


def swizzled(packed, swizzle):
    """Bytes of the box as they lie in shared memory from a 1024-byte boundary on."""
    data = np.ascontiguousarray(packed).view(np.uint8).reshape(-1)
    address = np.arange(data.size)
    rows = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    out = np.zeros_like(data)
    out[address ^ ((address >> 7 & rows) << 4)] = data
    return out


def random_tensor(shape, dtype, seed=0):
    out = aligned(shape, dtype)
    if np.dtype(dtype).kind == "f":
        out[...] = np.random.default_rng(seed).standard_normal(shape)
    else:
        out[...] = np.random.default_rng(seed).integers(0, 200, shape)
    return out


# ---- kernels ----

START = f"""
  mov.u32 %r0, %tid.x;
  setp.eq.u32 %p1, %r0, 0;
  mov.u32 %r1, tile;
  mov.u32 %r2, map;
  mov.u32 %r3, bar;
  mov.b64 %d3, m;
  cvta.param.u64 %d3, %d3;
  mov.u64 %d20, 0;
  mov.u32 %r9, %cluster_ctarank;
  ld.global.u32 %r10, [%d0];
  ld.global.u32 %r11, [%d0+4];
  ld.global.u32 %r12, [%d0+8];
  ld.global.u32 %r13, [%d0+12];
  ld.global.u32 %r14, [%d0+16];
  mul.wide.u32 %d10, %r0, 4;
  add.s64 %d11, %d1, %d10;
  mad.lo.u32 %r4, %r0, 4, %r1;
  ld.global.u32 %r8, [%d0+20];
  mov.u32 %r7, {TILE};
"""
INIT = "  @%p1 mbarrier.init.shared.b64 [%r3], 1;\n  fence.mbarrier_init.release.cluster;\n  bar.sync 0;\n"
EXPECT = "  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], %r8;\n"
WAIT = "WAIT:\n  mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0;\n  @!%p3 bra WAIT;\n"
LOOP = """
  mov.u32 %r5, 0;
{label}:
  add.u32 %r6, %r4, %r5;
  cvt.u64.u32 %d12, %r5;
  add.s64 %d12, %d11, %d12;
  mad.lo.u32 %r16, %r0, 4, %r5;
  setp.lt.u32 %p5, %r16, %r8;
  {copy}
  add.u32 %r5, %r5, 128;
  setp.lt.u32 %p4, %r5, %r8;
  @%p4 bra {label};
"""
DUMP = LOOP.format(label="DUMP", copy="@%p5 ld.shared.u32 %r15, [%r6];\n  @%p5 st.global.u32 [%d12], %r15;")
FILL = LOOP.format(label="FILL", copy="@%p5 ld.global.u32 %r15, [%d12];\n  @%p5 st.shared.u32 [%r6], %r15;")
PUBLISH = "  fence.proxy.async.shared::cta;\n  bar.sync 0;\n"
DONE = "  cp.async.bulk.commit_group;\n  cp.async.bulk.wait_group 0;\n"


def build(body, shared=SHARED):
    """p0: five coordinates and the box's bytes; p1: the dump or the image; m: the tensor map."""
    params = pointers(2) + ", .param .align 128 .b8 m[128]"
    return module(load_params(2) + START + body, params=params, shared=shared)


def coordinates_of(rank):
    return "{" + ", ".join(f"%r{10 + d}" for d in range(rank)) + "}"


def header(coordinates, bytes_):
    """p0 of the kernels: coordinates innermost first, then the bytes of the box."""
    out = np.zeros(6, np.int32)
    out[: len(coordinates)] = coordinates[::-1]
    out[5] = bytes_
    return out


def load_kernel(rank, form=None, last="", wait=WAIT):
    form = form or f"cp.async.bulk.tensor.{rank}d.shared::cluster.global{COUNTED}"
    body = INIT + EXPECT + f"  @%p1 {form} [%r1], [%d3, {coordinates_of(rank)}], [%r3]{last};\n" + wait + DUMP
    return build(body)


def check_load(tensor, box, coordinates, *, swizzle=0, steps=None, nan_fill=False, dtype=None, fill=0, kernel=None):
    values = tensor.view(np.int16) if dtype == "bfloat16" else tensor
    descriptor = vgpu.tensor_map(values, box, swizzle=swizzle, element_strides=steps, nan_fill=nan_fill, dtype=dtype)
    want = swizzled(box_of(tensor, box, coordinates, steps, fill), swizzle)
    dump = aligned(want.size)
    run = kernel or load_kernel(len(box))
    report = run.launch("k", 1, 32, [header(coordinates, want.size), dump, descriptor])
    np.testing.assert_array_equal(dump, want)
    assert report["bulk_bytes"] == want.size
    return report


def store_kernel(rank, form=None, last="", publish=PUBLISH, done=DONE):
    form = form or f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group"
    return build(FILL + publish + f"  @%p1 {form} [%d3, {coordinates_of(rank)}], [%r1]{last};\n" + done)


def check_store(tensor, box, coordinates, *, swizzle=0, steps=None, combine=None, kernel=None, dtype=None):
    grid, inside = walk(tensor.shape, box, coordinates, steps or [1] * len(box))
    packed = random_tensor(grid[0].shape, tensor.dtype, seed=9)
    want = tensor.copy()
    at = tuple(g[inside] for g in grid)
    want[at] = packed[inside] if combine is None else combine(want[at], packed[inside])
    image = swizzled(packed, swizzle)
    descriptor = vgpu.tensor_map(tensor, box, swizzle=swizzle, element_strides=steps, dtype=dtype)
    run = kernel or store_kernel(len(box))
    report = run.launch("k", 1, 32, [header(coordinates, image.size), image, descriptor])
    np.testing.assert_array_equal(tensor, want)
    assert report["bulk_bytes"] == image.size
