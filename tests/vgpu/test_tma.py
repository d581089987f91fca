"""Tensor copies: every form against a box walk in numpy."""

import numpy as np
import pytest
import torch
from tensor_reference import ORDERS, aligned, order
from tma_kernels import (
    COUNTED,
    DUMP,
    EXPECT,
    INIT,
    WAIT,
    box_of,
    build,
    check_load,
    check_store,
    coordinates_of,
    header,
    load_kernel,
    random_tensor,
    store_kernel,
    swizzled,
)

from pagedkern import vgpu

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
