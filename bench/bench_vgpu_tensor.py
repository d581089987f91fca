"""Tensor-core kernels on the virtual GPU: seconds of processor time and what they computed, one core.

    python -m bench.bench_vgpu_tensor

The kernels are Triton's for sm_90: a matmul fed by cp.async, one fed by TMA, and causal attention with wgmma and with
mma.sync. Best of several launches, with every check and counter on and with none.
"""

import time

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pagedkern import vgpu
from pagedkern.vgpu.triton import compile_kernel, launch_compiled


@triton.jit
def matmul(a, b, c, K, sam, sbk, scm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + rm[:, None] * sam + (k + rk)[None, :])
        y = tl.load(b + (k + rk)[:, None] * sbk + rn[None, :])
        total = tl.dot(x, y, total)
    tl.store(c + rm[:, None] * scm + rn[None, :], total)


@triton.jit
def matmul_tma(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a.load([m, k]), b.load([k, n]), total)
    c.store([m, n], total.to(tl.bfloat16))


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
        s = tl.where(rm[:, None] >= (n + rn)[None, :], tl.dot(queries, keys) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(top - higher)
        weight = weight * shrink + tl.sum(p, 1)
        total = tl.dot(p.to(values.dtype), values, total * shrink[:, None])
        top = higher
    tl.store(o + base + rm[:, None] * D + rd[None, :], (total / weight[:, None]).to(o.dtype.element_ty))


def cases():
    """(name, compiled kernel, grid, arguments)"""
    n = 512
    a, b, c = torch.randn(n, n).bfloat16(), torch.randn(n, n).bfloat16(), torch.zeros(n, n)
    out = torch.zeros(n, n, dtype=torch.bfloat16)
    plain = [a, b, c, n, n, n, n, 128, 128, 64]
    describe = TensorDescriptor.from_tensor
    tma = [describe(a, [128, 64]), describe(b, [64, 128]), describe(out, [128, 128]), n, 128, 128, 64]
    q, k, v = (torch.randn(2, n, 128).bfloat16() for _ in range(3))
    yield "matmul 512^3, cp.async", compile_kernel(matmul, *plain, num_warps=4, num_stages=3), (4, 4), plain
    yield "matmul 512^3, TMA", compile_kernel(matmul_tma, *tma, num_warps=4, num_stages=3), (4, 4), tma
    for rows, name in ((64, "wgmma"), (16, "mma.sync")):
        arguments = [q, k, v, torch.zeros_like(q), 0.1275, n, 128, rows, 64]
        compiled = compile_kernel(attention, *arguments, num_warps=4, num_stages=2)
        yield f"attention 2 x 512 x 128, {name}", compiled, (n // rows, 2), arguments


def main():
    """Prints a table."""
    print("| kernel | checks | s | Mwarp-instructions/s | GFLOP/s |\n|---|---|---|---|---|")
    for name, compiled, grid, arguments in cases():
        for checks in ("all", "none"):
            best = float("inf")
            for _ in range(5):
                with vgpu.session(threads=1, checks=checks, counters=checks == "all"):
                    start = time.process_time()
                    report = launch_compiled(compiled, grid, *arguments)
                    best = min(best, time.process_time() - start)
            flops = report["tensor_flops"] / best / 1e9
            print(f"| {name} | {checks} | {best:.3f} | {report['warp_instructions'] / best / 1e6:.2f} | {flops:.2f} |")


if __name__ == "__main__":
    main()
