"""The smallest kernels that Triton's interpreter gets wrong, and with TRITON_INTERPRET=1 its verdict on one of them."""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def dot(x, out, N: tl.constexpr):
    """All ones times all ones."""
    i = tl.arange(0, N)
    tile = tl.load(x + i[:, None] * N + i[None, :])
    tl.store(out + i[:, None] * N + i[None, :], tl.dot(tile, tile))


@triton.jit
def cast(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))


@triton.jit
def widen(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.float32))


def verdict(fault: str, launch) -> str:
    """ "right" or "wrong"; launch(kernel, args, **constexprs) runs one program."""
    if fault == "dot":
        out = torch.zeros(16, 16)
        launch(dot, [torch.ones(16, 16, dtype=torch.bfloat16), out], N=16)
        return "right" if torch.equal(out, torch.full((16, 16), 16.0)) else "wrong"
    if fault == "widen":
        values = torch.full((16,), 2.0**-130, dtype=torch.bfloat16)  # a subnormal number
        out = torch.zeros(16)
        launch(widen, [values, out], N=16)
        return "right" if torch.equal(out, values.float()) else "wrong"
    values = torch.full((16,), 1.0 + 2.0**-8 + 2.0**-9)  # rounds up to 1 + 2^-7
    out = torch.zeros(16, dtype=torch.bfloat16)
    launch(cast, [values, out], N=16)
    return "right" if torch.equal(out, values.bfloat16()) else "wrong"


if __name__ == "__main__":
    print(verdict(sys.argv[1], lambda kernel, args, **constants: kernel[(1,)](*args, **constants)))
