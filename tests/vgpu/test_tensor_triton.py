"""Kernels compiled by Triton for sm_90, known to be right on hardware, against float64: they use the tensor-core and
asynchronous families as no hand-written test would, and must give one result in every order."""

import pytest
import torch
from tensor_reference import ORDERS, order

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from pagedkern import vgpu  # noqa: E402
from pagedkern.vgpu.triton import compile_kernel, launch_compiled  # noqa: E402


@triton.jit
def matmul(
    a, b, c, K, sam, sak, sbk, sbn, scm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr
):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=ACC)
    for k in range(0, K, BK):
        x = tl.load(a + rm[:, None] * sam + (k + rk)[None, :] * sak)
        y = tl.load(b + (k + rk)[:, None] * sbk + rn[None, :] * sbn)
        total = tl.dot(x, y, total, out_dtype=ACC)
    tl.store(c + rm[:, None] * scm + rn[None, :], total)


@triton.jit
def matmul_upcast(a, b, c, K, sam, sbn, scm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A is widened in registers: wgmma takes it from there."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + rm[:, None] * sam + (k + rk)[None, :]).to(tl.bfloat16)
        y = tl.load(b + (k + rk)[:, None] + rn[None, :] * sbn)
        total = tl.dot(x, y, total)
    tl.store(c + rm[:, None] * scm + rn[None, :], total)


@triton.jit
def matmul_host_descriptors(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a.load([m, k]), b.load([k, n]), total)
    c.store([m, n], total.to(tl.bfloat16))


@triton.jit
def matmul_device_descriptors(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    da = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    db = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    dc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(da.load([m, k]), db.load([n, k]).T, total)
    dc.store([m, n], total.to(tl.bfloat16))


@triton.jit
def matmul_specialised(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One warp group loads, another multiplies; mbarriers between them."""
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=True):
        total = tl.dot(a.load([m, k]), b.load([k, n]), total)
    c.store([m, n], total.to(tl.bfloat16))


@triton.jit
def gather_pages(pages, table, out, P, ROWS: tl.constexpr, D: tl.constexpr):
    page = tl.load(table + tl.program_id(0))
    tile = pages.load([page, 0, 0]).reshape(ROWS, D)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + at[:, None] * D + tl.arange(0, D)[None, :], tile)


@triton.jit
def column_sums(x, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.program_id(0) * M, tl.program_id(1) * N
    out.atomic_add([0, n], x.load([m, n]))


@triton.jit
def attention(q, k, v, o, scale, N, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rd, rn = tl.arange(0, D), tl.arange(0, BN)
    base = tl.program_id(1) * N * D
    queries = tl.load(q + base + rm[:, None] * D + rd[None, :])
    top = tl.full((BM,), float("-inf"), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, D), tl.float32)
    for n in range(0, (tl.program_id(0) + 1) * BM, BN):
        keys = tl.load(k + base + (n + rn)[None, :] * D + rd[:, None])
        values = tl.load(v + base + (n + rn)[:, None] * D + rd[None, :])
        s = tl.dot(queries, keys) * scale
        s = tl.where(rm[:, None] >= (n + rn)[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(top - higher)
        weight = weight * shrink + tl.sum(p, 1)
        total = tl.dot(p.to(values.dtype), values, total * shrink[:, None])
        top = higher
    tl.store(o + base + rm[:, None] * D + rd[None, :], (total / weight[:, None]).to(o.dtype.element_ty))


def random_tensor(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype, generator=generator)
    x = torch.randn(shape, generator=generator)
    if dtype == torch.float32:  # what tf32 keeps
        x = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return x.to(dtype)


def in_every_order(compiled, grid, arguments, out, orders=ORDERS):
    """Launches in each order; the results must be the same bits. Returns the last report."""
    results, report = [], None
    for mode, seed in orders:
        out.zero_()
        with order(mode, seed):
            report = launch_compiled(compiled, grid, *arguments)
        results.append(out.clone())
    for other in results[1:]:
        assert torch.equal(other.view(torch.uint8), results[0].view(torch.uint8))
    return report


BF16, F16, F32, E4, E5, I8 = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
)
DOTS = [
    # a, b, a transposed, b transposed, BM, BN, BK, stages, warps, what it compiles to
    *[(BF16, BF16, ta, tb, 64, 64, 64, 2, 4, "m64n64k16.f32.bf16.bf16") for ta in (0, 1) for tb in (0, 1)],
    *[(BF16, BF16, 0, 0, 128, 128, 64, s, 4, "m64n128k16.f32.bf16.bf16") for s in (1, 2, 3, 4)],
    (BF16, BF16, 0, 0, 128, 256, 64, 3, 8, "m64n256k16.f32.bf16.bf16"),
    (BF16, BF16, 0, 1, 64, 32, 32, 3, 4, "m64n32k16.f32.bf16.bf16"),
    (BF16, BF16, 1, 0, 64, 16, 16, 2, 4, "m64n16k16.f32.bf16.bf16"),
    (F16, F16, 0, 0, 64, 128, 32, 4, 4, "m64n128k16.f32.f16.f16"),
    (F16, F16, 1, 1, 64, 64, 32, 2, 4, "m64n64k16.f32.f16.f16"),
    (F32, F32, 0, 1, 64, 64, 32, 2, 4, "m64n64k8.f32.tf32.tf32"),
    (F32, F32, 0, 0, 64, 32, 32, 3, 4, "m64n32k8.f32.tf32.tf32"),
    (F32, F32, 1, 0, 128, 64, 16, 1, 4, "m64n64k8.f32.tf32.tf32"),
    (E4, E4, 0, 1, 64, 64, 64, 2, 4, "m64n64k32.f32.e4m3.e4m3"),
    (E4, E4, 0, 0, 128, 128, 128, 3, 4, "m64n128k32.f32.e4m3.e4m3"),
    (E5, E4, 0, 1, 64, 64, 64, 2, 4, "m64n64k32.f32.e5m2.e4m3"),
    (E5, E5, 1, 1, 64, 32, 32, 2, 4, "m64n32k32.f32.e5m2.e5m2"),
    (I8, I8, 0, 1, 64, 64, 64, 2, 4, "m64n64k32.s32.s8.s8"),
    (I8, I8, 0, 0, 64, 128, 32, 3, 4, "m64n128k32.s32.s8.s8"),
    # too few rows for a warpgroup: mma.sync
    (BF16, BF16, 0, 0, 16, 32, 32, 2, 1, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
    (BF16, BF16, 1, 1, 32, 32, 64, 3, 4, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
    (F16, F16, 0, 1, 16, 16, 32, 2, 2, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
    (F32, F32, 0, 1, 16, 16, 32, 2, 1, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"),
    (I8, I8, 0, 1, 16, 16, 32, 2, 1, "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
    (E4, E4, 0, 1, 16, 16, 32, 2, 1, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
]


@pytest.mark.parametrize("ta,tb,at,bt,bm,bn,bk,stages,warps,opcode", DOTS)
def test_dot(ta, tb, at, bt, bm, bn, bk, stages, warps, opcode):
    m, n, k = 2 * bm, bn, 4 * bk
    a = random_tensor((k, m), ta).T if at else random_tensor((m, k), ta)
    b = random_tensor((n, k), tb, 1).T if bt else random_tensor((k, n), tb, 1)
    c = torch.zeros((m, n), dtype=torch.int32 if ta == I8 else torch.float32)
    accumulator = tl.int32 if ta == I8 else tl.float32
    arguments = [a, b, c, k, *a.stride(), *b.stride(), n, bm, bn, bk, accumulator]
    compiled = compile_kernel(matmul, *arguments, num_warps=warps, num_stages=stages)
    assert opcode in compiled.ptx
    report = in_every_order(compiled, (2, 1), arguments, c)
    want = a.double() @ b.double()
    if ta == I8:
        assert torch.equal(c.double(), want)
    else:
        size = a.double().abs() @ b.double().abs()  # k roundings of partial sums no larger than this
        assert ((c.double() - want).abs() <= size * k * 2.0**-25).all()
    assert report["tensor_flops"] == 2 * m * n * k


def test_dot_with_a_in_registers():
    m, n, k = 128, 64, 128
    a, b = random_tensor((m, k), E4), random_tensor((n, k), BF16, 1)
    c = torch.zeros((m, n))
    arguments = [a, b, c, k, k, k, n, 64, 64, 64]
    compiled = compile_kernel(matmul_upcast, *arguments, num_warps=4, num_stages=3)
    assert "}, {" in next(line for line in compiled.ptx.splitlines() if "wgmma.mma_async" in line)
    in_every_order(compiled, (2, 1), arguments, c)
    torch.testing.assert_close(c.double(), a.double() @ b.double().T, rtol=1e-5, atol=1e-4)


def test_half_accumulators_are_unpacked_too_early():
    """With float16 sums Triton 3.8 reads the accumulators before wgmma.wait_group. The PTX ISA leaves that undefined;
    on hardware only the assembler's own waits make it right. The virtual GPU takes PTX at its word."""
    a, b = random_tensor((64, 64), F16), random_tensor((64, 64), F16, 1)
    c = torch.zeros((64, 64), dtype=F16)
    arguments = [a, b, c, 64, *a.stride(), *b.stride(), 64, 64, 64, 32, tl.float16]
    compiled = compile_kernel(matmul, *arguments, num_warps=4, num_stages=2)
    assert "m64n64k16.f16.f16.f16" in compiled.ptx
    with pytest.raises(vgpu.KernelFault, match="while an asynchronous operation may still write it") as caught:
        launch_compiled(compiled, (1, 1), *arguments)
    assert caught.value.kind == "async"


def check_bf16(out, a, b):
    want = a.double() @ b.double()
    size = a.double().abs() @ b.double().abs()
    assert ((out.double() - want).abs() <= want.abs() * 2.0**-8 + size * a.shape[1] * 2.0**-24).all()


@pytest.mark.parametrize("bm,bn,bk,stages", [(64, 128, 64, 3), (128, 64, 32, 2), (64, 32, 128, 4)])
def test_host_descriptors(bm, bn, bk, stages):
    """Loads and stores that leave the tensors on every side."""
    m, n, k = 100, 200, 232
    a, b = random_tensor((m, k), BF16), random_tensor((k, n), BF16, 1)
    c = torch.zeros((m, n), dtype=BF16)
    describe = TensorDescriptor.from_tensor
    arguments = [describe(a, [bm, bk]), describe(b, [bk, bn]), describe(c, [bm, bn]), k, bm, bn, bk]
    compiled = compile_kernel(matmul_host_descriptors, *arguments, num_warps=4, num_stages=stages)
    assert "cp.async.bulk.tensor.2d.global.shared::cta" in compiled.ptx
    report = in_every_order(compiled, (-(-m // bm), -(-n // bn)), arguments, c)
    check_bf16(c, a, b)
    assert report["unique_global_read_bytes"] >= (m * k + k * n) * 2


@pytest.mark.parametrize("bm,bn,bk,stages", [(64, 64, 32, 2), (128, 128, 64, 3)])
def test_device_descriptors(bm, bn, bk, stages):
    m, n, k = 100, 136, 104
    a, b = random_tensor((m, k), BF16), random_tensor((n, k), BF16, 1)
    c = torch.zeros((m, n), dtype=BF16)
    arguments = [a, b, c, m, n, k, bm, bn, bk]
    compiled = compile_kernel(matmul_device_descriptors, *arguments, num_warps=4, num_stages=stages)
    assert "tensormap.replace" in compiled.ptx
    in_every_order(compiled, (-(-m // bm), -(-n // bn)), arguments, c)
    check_bf16(c, a, b.T)


def test_three_dimensional_descriptor():
    pages, rows, d = 10, 16, 64
    cache, table = random_tensor((pages, rows, d), BF16), torch.tensor([7, 0, 9, 3], dtype=torch.int32)
    out = torch.zeros((4 * rows, d), dtype=BF16)
    arguments = [TensorDescriptor.from_tensor(cache, [1, rows, d]), table, out, pages, rows, d]
    compiled = compile_kernel(gather_pages, *arguments, num_warps=4)
    assert "cp.async.bulk.tensor.3d" in compiled.ptx
    in_every_order(compiled, (4,), arguments, out)
    assert torch.equal(out.view(4, rows, d), cache[table])


def test_descriptor_reduction():
    x = torch.randint(-8, 8, (64, 64), generator=torch.Generator().manual_seed(0)).float()
    out = torch.zeros((8, 64))
    describe = TensorDescriptor.from_tensor
    arguments = [describe(x, [8, 32]), describe(out, [8, 32]), 8, 32]
    compiled = compile_kernel(column_sums, *arguments, num_warps=4)
    assert "cp.reduce.async.bulk.tensor.2d" in compiled.ptx
    in_every_order(compiled, (8, 2), arguments, out)
    assert torch.equal(out, x.view(8, 8, 64).sum(0))


def test_warp_specialised():
    m, n, k = 128, 128, 256
    a, b = random_tensor((m, k), BF16), random_tensor((k, n), BF16, 1)
    c = torch.zeros((m, n), dtype=BF16)
    describe = TensorDescriptor.from_tensor
    arguments = [describe(a, [64, 64]), describe(b, [64, 64]), describe(c, [64, 64]), k, 64, 64, 64]
    compiled = compile_kernel(matmul_specialised, *arguments, num_warps=4, num_stages=3)
    assert "setmaxnreg" in compiled.ptx
    in_every_order(compiled, (2, 2), arguments, c)
    check_bf16(c, a, b)


def test_cluster_of_two():
    m, n, k = 128, 128, 128
    a, b = random_tensor((m, k), BF16), random_tensor((k, n), BF16, 1)
    c = torch.zeros((m, n), dtype=BF16)
    describe = TensorDescriptor.from_tensor
    arguments = [describe(a, [128, 64]), describe(b, [64, 128]), describe(c, [128, 128]), k, 128, 128, 64]
    compiled = compile_kernel(matmul_host_descriptors, *arguments, num_warps=4, num_stages=2, num_ctas=2)
    assert ".reqnctapercluster" in compiled.ptx
    in_every_order(compiled, (1, 1), arguments, c)
    check_bf16(c, a, b)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "warps,bm,bn,d,stages", [(4, 64, 64, 64, 3), (8, 128, 64, 128, 2), (4, 64, 32, 128, 1), (4, 16, 32, 64, 2)]
)
def test_attention(dtype, warps, bm, bn, d, stages):
    heads, n = 2, 256
    q, k, v = (random_tensor((heads, n, d), dtype, seed) for seed in range(3))
    out = torch.zeros((heads, n, d), dtype=dtype)
    scale = 1.4426950408889634 / d**0.5
    arguments = [q, k, v, out, scale, n, d, bm, bn]
    compiled = compile_kernel(attention, *arguments, num_warps=warps, num_stages=stages)
    orders = ORDERS if bm == 64 and stages == 3 else [("late", 0), ("early", 1), ("random", 2)]
    in_every_order(compiled, (n // bm, heads), arguments, out, orders)
    s = q.double() @ k.double().transpose(1, 2) / d**0.5
    s = s.masked_fill(~torch.ones((n, n), dtype=torch.bool).tril(), float("-inf"))
    want = s.softmax(-1) @ v.double()
    bound = 2.0**-7 if dtype == BF16 else 2.0**-10
    assert (out.double() - want).abs().max() <= bound * v.double().abs().max()
