"""Fragment layouts, float formats and k-ordered sums, written down again in numpy; and a small PTX kernel builder."""

import contextlib

import numpy as np
import torch

from pagedkern import vgpu

MODES = ("late", "early", "random")
ORDERS = [(mode, seed) for mode in MODES for seed in (0, 1, 2)]

TORCH = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "s8": torch.int8,
    "u8": torch.uint8,
}
SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


def module(body: str, *, params="", regs="", shared="", name="k") -> vgpu.Module:
    """A kernel `k`: `params` and `shared` are declarations, `regs` more registers than the usual ranges."""
    return vgpu.Module(
        f"""
.version 8.7
.target sm_90a
.address_size 64
{shared}
.visible .entry {name}({params})
{{
  .reg .pred %p<16>;
  .reg .b16 %h<16>;
  .reg .b32 %r<600>;
  .reg .b64 %d<64>;
  {regs}
{body}
  ret;
}}
"""
    )


@contextlib.contextmanager
def order(mode, seed):
    """A session that runs in the given order."""
    with vgpu.session(seed=seed, async_completion=mode) as opened:
        yield opened


def aligned(shape, dtype=np.uint8):
    """Zeros that start on a 128-byte boundary."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(size + 128, np.uint8)
    start = -room.__array_interface__["data"][0] % 128
    return room[start : start + size].view(dtype).reshape(shape)


def random_matrix(rng, kind, shape):
    """Values of the type, as float64."""
    if kind == "s8":
        return rng.integers(-128, 128, shape).astype(np.float64)
    if kind == "u8":
        return rng.integers(0, 256, shape).astype(np.float64)
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "tf32":
        return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return torch.from_numpy(x).to(TORCH[kind]).double().numpy()


def raw_bytes(kind, x):
    """[..., bytes]: the elements as they lie in memory. tf32 carries noise in the bits that do not count."""
    x = np.ascontiguousarray(x)
    if kind == "tf32":
        noise = (np.arange(x.size, dtype=np.uint32) * 2654435761 % 8192).astype(np.uint32).reshape(x.shape)
        return (x.astype(np.float32).view(np.uint32) | noise).view(np.uint8).reshape(*x.shape, 4)
    t = torch.from_numpy(x).to(TORCH[kind])
    return t.view(torch.uint8).numpy().reshape(*x.shape, t.element_size())


def _words(raw):
    return np.ascontiguousarray(raw).reshape(*raw.shape[:-2], -1).view(np.uint32)


def a_fragment(kind, a):
    """[registers][lane] of the 16 x k operand."""
    raw, e = raw_bytes(kind, a), 4 // SIZE[kind]
    lane = np.arange(32)
    out = []
    for r in range(2 * a.shape[1] // (4 * e)):
        row, column = lane // 4 + 8 * (r % 2), lane % 4 * e + 4 * e * (r // 2)
        out.append(_words(raw[row[:, None], column[:, None] + np.arange(e)])[:, 0])
    return np.stack(out)


def b_fragment(kind, b):
    """[registers][lane] of the k x 8 operand."""
    raw, e = raw_bytes(kind, b.T), 4 // SIZE[kind]
    lane = np.arange(32)
    out = []
    for r in range(b.shape[0] // (4 * e)):
        k = lane % 4 * e + 4 * e * r
        out.append(_words(raw[(lane // 4)[:, None], k[:, None] + np.arange(e)])[:, 0])
    return np.stack(out)


def _accumulator_index(kind, n):
    lane = np.arange(32)
    if kind == "f16":
        r = np.arange(n // 4)[:, None, None]
        row = np.broadcast_to(lane[None, :, None] // 4 + 8 * (r % 2), (n // 4, 32, 2))
        return row, r // 2 * 8 + lane[None, :, None] % 4 * 2 + np.arange(2)
    r = np.arange(n // 2)[:, None]
    return lane // 4 + 8 * (r % 4 // 2), r // 4 * 8 + lane % 4 * 2 + r % 2


_NUMPY = {"f16": np.float16, "f32": np.float32, "s32": np.int32}


def accumulator_fragment(kind, c):
    """[registers][lane] of 16 x n accumulators."""
    rows, columns = _accumulator_index(kind, c.shape[1])
    values = np.ascontiguousarray(c[rows, columns].astype(_NUMPY[kind]))
    return values.view(np.uint32).reshape(values.shape[0], 32)


def from_accumulator(kind, words, n):
    """The 16 x n accumulators of [registers][lane]."""
    rows, columns = _accumulator_index(kind, n)
    out = np.zeros((16, n), _NUMPY[kind])
    out[rows, columns] = words.view(_NUMPY[kind]).reshape(rows.shape if kind == "f16" else words.shape)
    return out


def k_ordered(a, b, c, kind, saturate=False):
    """c + a b with one float32 rounding per k step, in k order; integers exactly, then wrapped or saturated."""
    if kind == "s32":
        exact = (a @ b + c).astype(np.int64)
        return np.clip(exact, -(2**31), 2**31 - 1).astype(np.int32) if saturate else exact.astype(np.int32)
    total = c.astype(np.float32)
    for k in range(a.shape[1]):
        total = (a[:, k : k + 1] * b[k : k + 1] + total.astype(np.float64)).astype(np.float32)
    return total.astype(_NUMPY[kind])


def registers(prefix, first, count):
    """{%r4,%r5,...}"""
    return "{" + ",".join(f"{prefix}{first + k}" for k in range(count)) + "}"


def load_words(base, first, count, lane="%r0", stride=32):
    """PTX: registers %r<first>... = words[k][lane] of the global array whose address is in `base`."""
    text = f"  mul.wide.u32 %d60, {lane}, 4;\n  add.s64 %d60, {base}, %d60;\n"
    return text + "".join(f"  ld.global.u32 %r{first + k}, [%d60+{4 * stride * k}];\n" for k in range(count))


def store_words(base, first, count, lane="%r0", stride=32):
    """PTX: the reverse of load_words."""
    text = f"  mul.wide.u32 %d60, {lane}, 4;\n  add.s64 %d60, {base}, %d60;\n"
    return text + "".join(f"  st.global.u32 [%d60+{4 * stride * k}], %r{first + k};\n" for k in range(count))


def load_params(count):
    """PTX: %d0.. = the 64-bit parameters p0.. as global addresses."""
    text = ""
    for k in range(count):
        text += f"  ld.param.u64 %d{k}, [p{k}];\n  cvta.to.global.u64 %d{k}, %d{k};\n"
    return text


def pointers(count):
    """The declarations that load_params reads."""
    return ", ".join(f".param .u64 p{k}" for k in range(count))
