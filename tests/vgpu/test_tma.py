"""Tensor copies: every form against a box walk in numpy, tensormap instructions, the encoder, planted faults."""

import itertools

import numpy as np
import pytest
import torch
from tensor_reference import ORDERS, aligned, load_params, module, order, pointers

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


SHAPES = {
    1: ((300,), (64,)),
    2: ((40, 96), (8, 32)),
    3: ((5, 12, 96), (2, 4, 32)),
    4: ((3, 4, 6, 64), (2, 2, 3, 32)),
    5: ((2, 3, 4, 5, 64), (1, 2, 2, 3, 32)),
}


@pytest.mark.parametrize("rank", range(1, 6))
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float16, np.int32, np.float32, np.int64, np.float64])
def test_load_types(rank, dtype):
    shape, box = SHAPES[rank]
    tensor = random_tensor(shape, dtype)
    check_load(tensor, box, [0] * rank)
    check_load(tensor, box, [1] * rank)
    check_load(tensor, box, [n - b // 2 - 1 for n, b in zip(shape, box, strict=True)])
    check_load(tensor, box, [-(b // 2) for b in box])
    check_load(tensor, box, [10 * n for n in shape])
    check_load(tensor, box, [-10 * n for n in shape])


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_load_swizzles(swizzle, dtype):
    inner = swizzle // np.dtype(dtype).itemsize
    tensor = random_tensor((3, 70, 3 * inner), dtype)
    for coordinates in ([0, 0, 0], [1, 5, inner], [0, -3, 2 * inner + 1], [2, 66, -1]):
        check_load(tensor, (2, 32, inner), coordinates, swizzle=swizzle)


@pytest.mark.parametrize(
    "name,dtype,nan",
    [("float16", np.uint16, 0x7FFF), ("bfloat16", np.uint16, 0x7FFF), ("float32", np.uint32, 0x7FFFFFFF)],
)
def test_nan_fill(name, dtype, nan):
    tensor = random_tensor((20, 64), dtype)
    check_load(tensor, (8, 16), (-2, 60), nan_fill=True, dtype=name, fill=nan)


def test_flush_of_subnormals():
    tensor = random_tensor((8, 64), np.float32)
    tensor[:, ::2] = 1e-40
    tensor[:, 1::4] = -1e-41
    descriptor = vgpu.tensor_map(tensor, (8, 16), dtype="float32_ftz")
    dump = aligned((8, 16), np.float32)
    load_kernel(2).launch("k", 1, 32, [header((0, 0), 512), dump, descriptor])
    want = np.where(np.abs(tensor[:, :16]) < 2.0**-126, np.copysign(np.float32(0), tensor[:, :16]), tensor[:, :16])
    np.testing.assert_array_equal(dump.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("steps", [(1, 2, 1), (3, 1, 1), (2, 3, 1), (8, 8, 1)])
def test_element_strides(steps):
    tensor = random_tensor((20, 30, 64), np.int16)
    check_load(tensor, (7, 9, 32), (1, -2, 40), steps=steps)


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_load_in_every_order(mode, seed):
    with order(mode, seed):
        check_load(random_tensor((40, 96), np.float16), (16, 64), (30, 50), swizzle=128)


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("tile", ["", ".tile"])
@pytest.mark.parametrize("space", ["shared::cluster", "shared::cta"])
@pytest.mark.parametrize("rank", range(1, 6))
def test_load_forms(rank, space, tile, hint):
    shape, box = SHAPES[rank]
    form = f"cp.async.bulk.tensor.{rank}d.{space}.global{tile}{COUNTED}{hint}"
    run = load_kernel(rank, form, last=", %d20" if hint else "")
    check_load(random_tensor(shape, np.int16), box, [1] * rank, kernel=run)


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("tile", ["", ".tile"])
@pytest.mark.parametrize("rank", range(1, 6))
def test_multicast_forms(rank, tile, hint):
    shape, box = SHAPES[rank]
    tensor = random_tensor(shape, np.int16)
    want = swizzled(box_of(tensor, box, [1] * rank), 0)
    form = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global{tile}{COUNTED}.multicast::cluster{hint}"
    body = INIT + EXPECT + "  barrier.cluster.arrive;\n  barrier.cluster.wait;\n  setp.eq.and.u32 %p2, %r9, 1, %p1;\n"
    body += f"  mov.u16 %h0, 3;\n  @%p2 {form} [%r1], [%d3, {coordinates_of(rank)}], [%r3], %h0"
    body += (", %d20" if hint else "") + ";\n" + WAIT + "  mul.wide.u32 %d13, %r9, %r8;\n  add.s64 %d11, %d11, %d13;\n"
    body += DUMP + "  barrier.cluster.arrive;\n  barrier.cluster.wait;\n"
    dump = aligned((2, want.size))
    arguments = [header([1] * rank, want.size), dump, vgpu.tensor_map(tensor, box)]
    report = build(body).launch("k", 2, 32, arguments, cluster=2)
    np.testing.assert_array_equal(dump, np.stack([want, want]))
    assert report["bulk_bytes"] == want.size


# ---- stores and reductions ----


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


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("tile", ["", ".tile"])
@pytest.mark.parametrize("rank", range(1, 6))
def test_store_forms(rank, tile, hint):
    shape, box = SHAPES[rank]
    form = f"cp.async.bulk.tensor.{rank}d.global.shared::cta{tile}.bulk_group{hint}"
    run = store_kernel(rank, form, last=", %d20" if hint else "")
    for coordinates in ([1] * rank, [-1] * rank, [n - 2 for n in shape], [n for n in shape]):
        check_store(random_tensor(shape, np.int16), box, coordinates, kernel=run)


@pytest.mark.parametrize("mode,seed", ORDERS)
@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_store_swizzles(swizzle, mode, seed):
    with order(mode, seed):
        check_store(random_tensor((50, 200), np.float16), (16, swizzle // 2), (40, 3), swizzle=swizzle)


def test_store_element_strides():
    check_store(random_tensor((20, 30, 64), np.int16), (7, 9, 32), (1, -2, 40), steps=(2, 3, 1))


REDUCERS = {
    "add": lambda a, b: a + b,
    "min": np.minimum,
    "max": np.maximum,
    "inc": lambda a, b: np.where(a >= b, 0, a + 1).astype(a.dtype),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(a.dtype),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("tile", ["", ".tile"])
@pytest.mark.parametrize("op", REDUCERS)
@pytest.mark.parametrize("rank", range(1, 6))
def test_reduce_forms(rank, op, tile, hint):
    shape, box = SHAPES[rank]
    form = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{op}{tile}.bulk_group{hint}"
    run = store_kernel(rank, form, last=", %d20" if hint else "")
    box = box[:-1] + (16,)
    check_store(random_tensor(shape, np.uint32), box, [-1] * rank, combine=REDUCERS[op], kernel=run)


@pytest.mark.parametrize(
    "op,dtype",
    [(o, t) for o in ("add", "min", "max") for t in (np.int32, np.uint64, np.int64, np.float16)]
    + [("add", np.float32), ("add", np.float64)]
    + [(o, t) for o in ("and", "or", "xor") for t in (np.int32, np.uint64, np.int64)],
)
def test_reduce_types(op, dtype):
    run = store_kernel(2, f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.bulk_group")
    check_store(random_tensor((20, 64), dtype), (8, 16), (15, 5), combine=REDUCERS[op], kernel=run)


def test_reduce_bfloat16():
    values = torch.randn((2, 16, 32), generator=torch.Generator().manual_seed(0)).bfloat16()
    memory, operand = values[0].clone(), values[1].clone()
    run = store_kernel(2, "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group")
    run.launch("k", 1, 32, [header((0, 0), 1024), operand, vgpu.tensor_map(memory, (16, 32))])
    assert torch.equal(memory, (values[0].float() + values[1].float()).bfloat16())


def test_reduction_that_the_type_lacks():
    run = store_kernel(2, "cp.reduce.async.bulk.tensor.2d.global.shared::cta.min.bulk_group")
    with pytest.raises(vgpu.KernelFault, match="tensor maps of f32"):
        check_store(random_tensor((20, 64), np.float32), (8, 16), (0, 0), kernel=run)


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("tile", ["", ".tile"])
@pytest.mark.parametrize("rank", range(1, 6))
def test_prefetch_forms(rank, tile, hint):
    shape, box = SHAPES[rank]
    form = f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global{tile}{hint} [%d3, {coordinates_of(rank)}]"
    tensor = random_tensor(shape, np.int16)
    arguments = [header([1] * rank, 0), aligned(128), vgpu.tensor_map(tensor, box)]
    report = build(f"  @%p1 {form}{', %d20' if hint else ''};\n").launch("k", 1, 32, arguments)
    assert report["bulk_bytes"] == 0


# ---- tensormap.replace ----

FIELDS = [
    ("global_address", "b64", "", "%d15"),
    ("rank", "b32", "", "0x1"),
    ("box_dim", "b32", "0x0, ", "%r20"),
    ("box_dim", "b32", "0x1, ", "%r21"),
    ("global_dim", "b32", "0x0, ", "%r22"),
    ("global_dim", "b32", "0x1, ", "%r23"),
    ("global_stride", "b64", "0x0, ", "%d16"),
    ("element_stride", "b32", "0x0, ", "%r24"),
    ("element_stride", "b32", "0x1, ", "%r24"),
    ("elemtype", "b32", "", "0x1"),
    ("interleave_layout", "b32", "", "0x0"),
    ("swizzle_mode", "b32", "", "0x2"),
    ("fill_mode", "b32", "", "0x0"),
]


def replace_kernel(space, scope="gpu", skip=None):
    """Builds a map of p1's 16-bit 20 x 64 matrix in shared or global memory and loads a 4 x 32 box with it."""
    shared = space == ".shared::cta"
    body = "  ld.param.u64 %d15, [p1];\n  mov.u32 %r20, 32;\n  mov.u32 %r21, 4;\n  mov.u32 %r22, 64;\n"
    body += "  mov.u32 %r23, 20;\n  mov.u32 %r24, 1;\n  mov.u64 %d16, 128;\n  add.s64 %d17, %d1, 4096;\n"
    target = "%r2" if shared else "%d17"
    body += "  mul.lo.u32 %r16, %r0, 4;\n  add.u32 %r17, %r2, %r16;\n  cvt.u64.u32 %d18, %r16;\n"
    body += "  add.s64 %d19, %d17, %d18;\n"
    body += "  mov.u32 %r18, 0;\n" + (
        "  st.shared.u32 [%r17], %r18;\n" if shared else "  st.global.u32 [%d19], %r18;\n"
    )
    body += "  bar.warp.sync 0xffffffff;\n"
    for name, bits, at, value in FIELDS:
        if name != skip:
            body += f"  @%p1 tensormap.replace.tile.{name}{space}.b1024.{bits} [{target}], {at}{value};\n"
    body += "  bar.warp.sync 0xffffffff;\n"
    if shared:
        copy = f"tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.{scope}.sync.aligned"
        body += f"  {copy} [%d17], [%r2], 128;\n"
    body += f"  fence.proxy.tensormap::generic.acquire.{scope} [%d17], 128;\n"
    body += (
        INIT
        + EXPECT
        + f"  @%p1 cp.async.bulk.tensor.2d.shared::cta.global{COUNTED} [%r1], [%d17, {{%r10, %r11}}], [%r3];\n"
    )
    return build(body + WAIT + "  add.s64 %d11, %d11, 8192;\n" + DUMP)


def replaced(run):
    memory = aligned(8192 + 256)
    tensor = memory[:2560].view(np.int16).reshape(20, 64)
    tensor[...] = random_tensor((20, 64), np.int16)
    run.launch("k", 1, 32, [header((18, 40), 256), memory, bytes(128)])
    want = swizzled(box_of(tensor, (4, 32), (18, 40)), 64)
    np.testing.assert_array_equal(memory[8192:], want)


@pytest.mark.parametrize("scope", ["cta", "cluster", "gpu", "sys"])
@pytest.mark.parametrize("space", ["", ".global", ".shared::cta"])
def test_replace(space, scope):
    replaced(replace_kernel(space, scope))


@pytest.mark.parametrize("skip", sorted({f[0] for f in FIELDS}))
def test_replace_needs_every_field(skip):
    with pytest.raises(vgpu.KernelFault, match="lacks fields|not a tensor map"):
        replaced(replace_kernel(".shared::cta", skip=skip))


@pytest.mark.parametrize(
    "field,bits,arguments",
    [
        ("rank", "b32", "5"),
        ("box_dim", "b32", "0, 257"),
        ("global_dim", "b32", "0, 0"),
        ("element_stride", "b32", "0, 9"),
        ("global_stride", "b64", "0, 1099511627776"),
        ("elemtype", "b32", "13"),
        ("interleave_layout", "b32", "3"),
        ("swizzle_mode", "b32", "4"),
        ("fill_mode", "b32", "2"),
    ],
)
def test_replace_of_a_bad_value(field, bits, arguments):
    body = "  mov.u32 %r18, 0;\n  mad.lo.u32 %r17, %r0, 4, %r2;\n  st.shared.u32 [%r17], %r18;\n"
    body += "  bar.warp.sync 0xffffffff;\n"
    body += f"  @%p1 tensormap.replace.tile.{field}.shared::cta.b1024.{bits} [%r2], {arguments};\n"
    with pytest.raises(vgpu.KernelFault, match="does not fit the field") as caught:
        build(body).launch("k", 1, 32, [header((0, 0), 0), aligned(128), bytes(128)])
    assert caught.value.kind == "invalid"


# ---- the encoder ----

ENCODER = {
    "boxDim[0] must span a multiple of 16 bytes": dict(box=(8, 4)),
    "boxDim[1] must be 1 to 256": dict(box=(257, 32)),
    "boxDim[0] spans more bytes than the swizzle": dict(box=(8, 64), swizzle=64),
    "elementStrides[1] must be 1 to 8": dict(element_strides=(9, 1)),
    "oobFill of NaN needs a floating point": dict(nan_fill=True),
    "interleave of 32B needs the 32B swizzle": dict(shape=(4, 8, 64), box=(1, 8, 32), interleave=32),
    "tensorRank must be 3 or more": dict(interleave=16),
    "tensorRank must be 1 to 5": dict(shape=(1, 1, 1, 1, 2, 64), box=(1, 1, 1, 1, 2, 32)),
}


@pytest.mark.parametrize("message", ENCODER)
def test_encoder_refuses(message):
    options = dict(ENCODER[message])
    tensor = random_tensor(options.pop("shape", (20, 64)), np.int16)
    with pytest.raises(ValueError) as caught:
        vgpu.tensor_map(tensor, options.pop("box", (8, 32)), **options)
    assert message in str(caught.value) or "do not fit together" in str(caught.value)


def test_encoder_checks_alignment():
    flat = aligned(4096)
    with pytest.raises(ValueError, match="globalAddress must be aligned to 16"):
        vgpu.tensor_map(flat[8:][:2048].reshape(16, 128), (8, 64))
    with pytest.raises(ValueError, match=r"globalStrides\[0\] must be a multiple of 16"):
        vgpu.tensor_map(flat[: 24 * 8].reshape(8, 24)[:, :16], (8, 16))
    with pytest.raises(ValueError, match="innermost dimension must be contiguous"):
        vgpu.tensor_map(flat.reshape(64, 64)[:, ::2], (8, 16))


# ---- planted faults ----


def launch_load(run, tensor, descriptor, box=(8, 32), coordinates=(0, 0), expect=None):
    bytes_ = int(np.prod(box)) * tensor.itemsize
    return run.launch("k", 1, 32, [header(coordinates, expect or bytes_), aligned(bytes_), descriptor])


def matrix():
    return random_tensor((40, 96), np.int16)


def edited(**changes):
    descriptor = vgpu.tensor_map(changes.pop("tensor", matrix()), changes.pop("box", (8, 32)), **changes)
    return descriptor


def test_bytes_that_are_no_map():
    with pytest.raises(vgpu.KernelFault, match="not a tensor map"):
        launch_load(load_kernel(2), matrix(), bytes(128))


def test_map_that_was_overwritten():
    descriptor = edited()
    descriptor.data = descriptor.data[:40] + b"\x07" + descriptor.data[41:]
    with pytest.raises(vgpu.KernelFault, match="overwritten in part"):
        launch_load(load_kernel(2), matrix(), descriptor)


def test_map_of_another_rank():
    with pytest.raises(vgpu.KernelFault, match="has 2 dimensions, the instruction 3"):
        launch_load(load_kernel(3), matrix(), edited())


@pytest.mark.parametrize(
    "changes,text",
    [
        (dict(swizzle=128), "narrower than its swizzle"),
        (dict(tensor=random_tensor((40, 96), np.float32), dtype="tfloat32"), "tensor map of tf32"),
        (dict(tensor=random_tensor((4, 40, 96), np.int16), box=(1, 8, 32), interleave=16), "interleaved"),
    ],
)
def test_unsupported_maps_are_named(changes, text):
    with pytest.raises(vgpu.KernelFault, match=text) as caught:
        launch_load(load_kernel(len(changes.get("box", (8, 32)))), matrix(), edited(**changes))
    assert caught.value.kind == "unsupported"


def test_tensor_larger_than_its_memory():
    tensor = matrix()
    descriptor = vgpu.tensor_map(tensor, (8, 32))
    descriptor.tensor = tensor[:10]
    launch_load(load_kernel(2), tensor, descriptor, coordinates=(0, 0))
    with pytest.raises(vgpu.KernelFault, match="outside") as caught:
        launch_load(load_kernel(2), tensor, descriptor, coordinates=(8, 0))
    assert caught.value.kind == "out_of_bounds"


def test_box_larger_than_shared_memory():
    tensor = aligned((1, 1, 1, 1, 256), np.int64)
    descriptor = vgpu.tensor_map(tensor, (256, 256, 256, 256, 256))
    with pytest.raises(vgpu.KernelFault, match="more than shared memory") as caught:
        load_kernel(5).launch("k", 1, 32, [header([0] * 5, 256), aligned(256), descriptor])
    assert caught.value.kind == "out_of_bounds"


def test_misaligned_destination():
    body = INIT + EXPECT + "  add.u32 %r16, %r1, 64;\n"
    body += f"  @%p1 cp.async.bulk.tensor.2d.shared::cta.global{COUNTED} [%r16], [%d3, {{%r10, %r11}}], [%r3];\n"
    with pytest.raises(vgpu.KernelFault, match="128-byte alignment"):
        launch_load(build(body + WAIT), matrix(), edited())


@pytest.mark.parametrize("mode", ["late", "early", "random"])
def test_load_without_a_wait(mode):
    with vgpu.session(async_completion=mode), pytest.raises(vgpu.KernelFault, match="nothing waited for") as caught:
        launch_load(load_kernel(2, wait=""), matrix(), edited())
    assert caught.value.kind == "async"
    assert "cp.async.bulk.tensor" in str(caught.value)


def test_clipped_box_still_counts_whole():
    """A wait for only the bytes inside the tensor never ends: the transaction count is that of the full box."""
    with pytest.raises(vgpu.KernelFault, match="-256 bytes short") as caught:
        launch_load(load_kernel(2), matrix(), edited(), coordinates=(36, 0), expect=256)
    assert caught.value.kind == "deadlock"


STORE_FAULTS = {
    "no proxy fence": (dict(publish="  bar.sync 0;\n"), "no fence.proxy.async"),
    "no wait": (dict(done=""), "a block that exits"),
    "not committed": (dict(done="  cp.async.bulk.wait_group 0;\n"), "a block that exits"),
    "source overwritten": (dict(done="  bar.sync 0;\n  st.shared.u32 [%r4], %r0;\n" + DONE), "may still read"),
}


@pytest.mark.parametrize("name", STORE_FAULTS)
def test_store_fault_is_caught(name):
    options, text = STORE_FAULTS[name]
    with pytest.raises(vgpu.KernelFault, match=text) as caught:
        check_store(matrix(), (8, 32), (0, 0), kernel=store_kernel(2, **options))
    assert caught.value.kind == "async"


def test_im2col_is_refused_by_name():
    form = f"cp.async.bulk.tensor.4d.shared::cluster.global.im2col{COUNTED}"
    with pytest.raises(vgpu.ParseError, match="im2col"):
        load_kernel(4, form)


def test_every_order_gives_one_result():
    """Loads, a swizzled store and a reduction in one kernel, over all orders."""
    source, results = random_tensor((32, 64), np.float32), []
    body = (
        INIT
        + EXPECT
        + f"  @%p1 cp.async.bulk.tensor.2d.shared::cta.global{COUNTED} [%r1], [%d3, {{%r10, %r11}}], [%r3];\n"
    )
    body += (
        WAIT
        + "  @%p1 cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%d3, {%r12, %r13}], [%r1];\n"
        + DONE
    )
    run = build(body)
    for mode, seed in itertools.product(("late", "early", "random"), range(3)):
        tensor = aligned((32, 64), np.float32)
        tensor[...] = source
        at = header((0, 0), 1024)
        at[2:4] = (32, 16)
        with order(mode, seed):
            run.launch("k", 1, 32, [at, aligned(128), vgpu.tensor_map(tensor, (8, 32), swizzle=128)])
        results.append(tensor)
    want = source.copy()
    want[16:24, 32:] += source[:8, :32]
    for tensor in results:
        np.testing.assert_array_equal(tensor, want)
