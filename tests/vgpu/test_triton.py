"""What Triton's compiler makes for sm_90, on torch CPU tensors: elementwise, reductions, scans, atomics, softmax.

Products of matrices, descriptors and attention are in test_tensor_triton.py."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from pagedkern import vgpu  # noqa: E402
from pagedkern.vgpu.triton import compile_kernel, launch, launch_compiled  # noqa: E402

ORDERS = [(0, "late"), (1, "early"), (2, "random")]
in_every_order = pytest.mark.parametrize("seed,mode", ORDERS)


@triton.jit
def add_scaled(x, y, out, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    tl.store(out + at, tl.load(x + at, live) * scale + tl.load(y + at, live), live)


@triton.jit
def row_statistics(x, total, largest, where, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + at, at < columns, other=-float("inf"))
    tl.store(total + row, tl.sum(tl.where(at < columns, values, 0.0), 0))
    tl.store(largest + row, tl.max(values, 0))
    tl.store(where + row, tl.argmax(values, 0))


@triton.jit
def scans(x, sums, products, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at)
    tl.store(sums + at, tl.cumsum(values, 0, reverse=REVERSE))
    tl.store(products + at, tl.cumprod(tl.where(values > 0, 2, 1), 0, reverse=REVERSE))


@triton.jit
def histogram(x, counts, largest, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, at < n, other=0)
    tl.atomic_add(counts + values % 16, 1, at < n)
    tl.atomic_max(largest, tl.max(values, 0))


@triton.jit
def last_block_adds(x, partial, done, out, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    tl.store(partial + block, tl.sum(tl.load(x + block * BLOCK + tl.arange(0, BLOCK)), 0))
    if tl.atomic_add(done, 1, sem="acq_rel") == BLOCKS - 1:
        tl.store(out, tl.sum(tl.load(partial + tl.arange(0, BLOCKS), volatile=True), 0))


@triton.jit
def softmax(x, out, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + at, at < columns, other=-float("inf")).to(tl.float32)
    weights = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * stride + at, (weights / tl.sum(weights, 0)).to(out.dtype.element_ty), at < columns)


@triton.jit
def sort_rows(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.sort(tl.load(x + at)))


@triton.jit
def transpose(x, out, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tile = tl.load(x + rows * N + columns)
    tl.store(out + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :], tl.trans(tile))


def run(kernel, grid, *args, seed=0, mode="late", **options):
    with vgpu.session(seed=seed, async_completion=mode) as session:
        report = launch(kernel, grid, *args, **options)
    assert session.reports == [report]
    return report


@in_every_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_elementwise(dtype, seed, mode):
    x, y = torch.randn(2, 1000).to(dtype)
    out = torch.full((1008,), 7.0).to(dtype)
    run(add_scaled, (8,), x, y, out, 1000, 0.5, BLOCK=128, seed=seed, mode=mode)
    # Half of a 16-bit float is exact, so that one rounding is left; float32 may be a fused multiply-add, which is too.
    expected = (x.double() * 0.5 + y.double()).float().to(dtype)
    assert torch.equal(out[:1000], expected) and (out[1000:] == 7).all()


@in_every_order
@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("columns", [1, 100, 1024])
def test_reductions(columns, warps, seed, mode):
    x = torch.randint(-100, 100, (6, columns)).float()
    total, largest, where = torch.zeros(6), torch.zeros(6), torch.zeros(6, dtype=torch.int32)
    options = {"BLOCK": max(16, triton.next_power_of_2(columns)), "num_warps": warps, "seed": seed, "mode": mode}
    run(row_statistics, (6,), x, total, largest, where, columns, x.stride(0), **options)
    assert torch.equal(total, x.sum(1)) and torch.equal(largest, x.amax(1))
    np.testing.assert_array_equal(where.numpy(), x.numpy().argmax(1))  # the first of equals, as Triton promises


@in_every_order
@pytest.mark.parametrize("reverse", [False, True])
def test_scans(reverse, seed, mode):
    x = torch.randint(-1, 2, (2, 256), dtype=torch.int32)
    x[:, 40:] = x[:, 40:].clamp(max=0)  # products stay in range
    sums, products = torch.zeros_like(x), torch.zeros_like(x)
    run(scans, (2,), x, sums, products, BLOCK=256, REVERSE=reverse, seed=seed, mode=mode)
    order = (lambda a: a[:, ::-1]) if reverse else (lambda a: a)
    factors = np.where(x.numpy() > 0, 2, 1).astype(np.int32)
    np.testing.assert_array_equal(sums.numpy(), order(order(x.numpy()).cumsum(1)))
    np.testing.assert_array_equal(products.numpy(), order(order(factors).cumprod(1, dtype=np.int32)))


@in_every_order
def test_atomics(seed, mode):
    x = torch.randint(0, 1 << 20, (1500,), dtype=torch.int32)
    counts, largest = torch.zeros(16, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    report = run(histogram, (6,), x, counts, largest, 1500, BLOCK=256, seed=seed, mode=mode)
    assert torch.equal(counts, torch.bincount(x % 16, minlength=16).int()) and largest[0] == x.max()
    assert report["atomics"] > 0


@in_every_order
def test_the_last_block_sees_what_all_others_wrote(seed, mode):
    x = torch.randint(-9, 10, (16, 64)).float()
    partial, done, out = torch.zeros(16), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    run(last_block_adds, (16,), x, partial, done, out, BLOCKS=16, BLOCK=64, seed=seed, mode=mode)
    assert out[0] == x.sum() and done[0] == 16


@in_every_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax(dtype, seed, mode):
    x = (torch.randn(5, 300) * 20).to(dtype)
    x[2, 100:] = -float("inf")
    out = torch.zeros_like(x)
    run(softmax, (5,), x, out, 300, x.stride(0), BLOCK=512, seed=seed, mode=mode)
    expected = x.double().softmax(1)
    # The exponent of ex2 is a rounded product, off by up to 2**-23 of itself; then a few roundings, and that to dtype.
    depth = torch.where(x.isinf(), 0.0, x.double().amax(1, keepdim=True) - x.double())
    bound = (2.0**-21 + depth * 2.0**-23 + torch.finfo(dtype).eps / 2) * expected + torch.finfo(torch.float32).tiny
    assert ((out.double() - expected).abs() <= bound).all()
    assert not out[2, 100:].any()


@in_every_order
def test_sort(seed, mode):
    x = torch.randint(-1000, 1000, (3, 128), dtype=torch.int32)
    out = torch.zeros_like(x)
    run(sort_rows, (3,), x, out, BLOCK=128, seed=seed, mode=mode)
    assert torch.equal(out, x.sort(1).values)


@in_every_order
def test_transpose_through_shared_memory(seed, mode):
    x = torch.randn(32, 64)
    out = torch.zeros(64, 32)
    report = run(transpose, (1,), x, out, M=32, N=64, seed=seed, mode=mode)
    assert torch.equal(out, x.t()) and report["shared_store_wavefronts"] > 0


def test_a_kernel_is_compiled_once_and_launched_again():
    out = torch.zeros(256)
    compiled = compile_kernel(add_scaled, out, out, out, 256, 2.0, BLOCK=64, num_warps=2)
    assert ".target sm_90a" in compiled.ptx
    for scale in (2.0, 3.0):
        x, y = torch.randint(-99, 99, (2, 256)).float()
        report = launch_compiled(compiled, (4,), x, y, out, 256, scale, 64)
        assert torch.equal(out, x * scale + y) and report["block"] == (64, 1, 1)


def test_a_mask_that_is_missing_is_found():
    x, y, out = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)
    with pytest.raises(vgpu.KernelFault) as caught:
        launch(add_scaled, (8,), x, y, out, 1024, 1.0, BLOCK=128)
    assert (caught.value.kind, caught.value.block) == ("out_of_bounds", (7, 0, 0))
    assert "add_scaled" in caught.value.kernel and "test_triton.py:" in caught.value.source


def test_missing_arguments_are_named():
    with pytest.raises(TypeError, match=r"add_scaled: missing arguments \['scale', 'BLOCK'\]"):
        launch(add_scaled, (1,), torch.zeros(4), torch.zeros(4), torch.zeros(4), 4)
