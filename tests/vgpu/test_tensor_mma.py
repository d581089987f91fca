"""mma.sync: every form against sums in numpy, bit for bit."""

import numpy as np
import pytest
from tensor_reference import (
    a_fragment,
    accumulator_fragment,
    b_fragment,
    from_accumulator,
    k_ordered,
    load_params,
    load_words,
    module,
    pointers,
    random_matrix,
    registers,
    store_words,
)

from pagedkern import vgpu

FORMS = [(16, "f16", "f16", c, "") for c in ("f16", "f32")]
FORMS += [(8, "f16", "f16", c, "") for c in ("f16", "f32")]
FORMS += [(k, "bf16", "bf16", "f32", "") for k in (8, 16)]
FORMS += [(k, "tf32", "tf32", "f32", "") for k in (4, 8)]
FORMS += [
    (k, a, b, c, "") for k in (16, 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for c in ("f16", "f32")
]
FORMS += [(k, a, b, "s32", s) for k in (16, 32) for a in ("s8", "u8") for b in ("s8", "u8") for s in ("", ".satfinite")]


def mma_kernel(k, a, b, c, saturate, counts):
    na, nb, nc = counts
    first_b, first_c, first_d = 10 + na, 10 + na + nb, 10 + na + nb + nc
    body = load_params(4) + "  mov.u32 %r0, %laneid;\n"
    body += load_words("%d0", 10, na) + load_words("%d1", first_b, nb) + load_words("%d2", first_c, nc)
    body += f"  mma.sync.aligned.m16n8k{k}.row.col{saturate}.{c}.{a}.{b}.{c} {registers('%r', first_d, nc)},"
    body += f" {registers('%r', 10, na)}, {registers('%r', first_b, nb)}, {registers('%r', first_c, nc)};\n"
    return module(body + store_words("%d3", first_d, nc), params=pointers(4))


@pytest.mark.parametrize("k,a,b,c,saturate", FORMS)
def test_form(k, a, b, c, saturate):
    rng = np.random.default_rng(3)
    for scale in (1, 2**31 - 2000):  # the second overflows the integer sums
        if scale > 1 and c != "s32":
            continue
        left, right = random_matrix(rng, a, (16, k)), random_matrix(rng, b, (k, 8))
        start = rng.standard_normal((16, 8)).astype(np.float16).astype(np.float64)
        if c == "s32":
            start = rng.integers(-1000, 1000, (16, 8)).astype(np.float64) + (scale if scale > 1 else 0)
        fa, fb, fc = a_fragment(a, left), b_fragment(b, right), accumulator_fragment(c, start)
        out = np.zeros_like(fc)
        kernel = mma_kernel(k, a, b, c, saturate, (len(fa), len(fb), len(fc)))
        with vgpu.session() as session:
            kernel.launch("k", 1, 32, [fa, fb, fc, out])
        want = k_ordered(left, right, start, c, bool(saturate))
        np.testing.assert_array_equal(from_accumulator(c, out, 8), want)
        assert session.reports[0]["tensor_flops"] == 2 * 16 * 8 * k


def test_sinks_and_immediates():
    """D may have sinks, C may be immediates, as in sums over rows."""
    rng = np.random.default_rng(4)
    left = random_matrix(rng, "bf16", (16, 16))
    fa, out = a_fragment("bf16", left), np.zeros((4, 32), np.uint32)
    body = load_params(2) + "  mov.u32 %r0, %laneid;\n" + load_words("%d0", 10, 4)
    body += "  mov.u32 %r20, 0x3f803f80;\n  mov.u32 %r31, 0;\n  mov.u32 %r33, 0;\n"
    body += "  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r30,_,%r32,_}, {%r10,%r11,%r12,%r13},"
    body += " {%r20,%r20}, {0.,0.,0f3F800000,0.};\n"
    module(body + store_words("%d1", 30, 4), params=pointers(2)).launch("k", 1, 32, [fa, out])
    want = k_ordered(left, np.ones((16, 8)), np.repeat([[0.0], [1.0]], 8, 0).repeat(8, 1), "f32")
    got = from_accumulator("f32", out, 8)
    np.testing.assert_array_equal(got[:, ::2], want[:, ::2])
    assert not got[:, 1::2].any()


def test_nan_is_canonical():
    fa = np.full((4, 32), 0xFFC1FFC1, np.uint32)
    fb, fc = np.full((2, 32), 0x3F803F80, np.uint32), np.zeros((4, 32), np.uint32)
    out = np.zeros((4, 32), np.uint32)
    mma_kernel(16, "bf16", "bf16", "f32", "", (4, 2, 4)).launch("k", 1, 32, [fa, fb, fc, out])
    assert (out == 0x7FFFFFFF).all()


def test_half_warp_is_a_fault():
    kernel = mma_kernel(16, "bf16", "bf16", "f32", "", (4, 2, 4))
    words = np.zeros((4, 32), np.uint32)
    with pytest.raises(vgpu.KernelFault, match="needs all 32 lanes") as caught:
        kernel.launch("k", 1, 16, [words, words, words, words])
    assert caught.value.kind == "invalid"
    assert "mma.sync" in str(caught.value)


@pytest.mark.parametrize(
    "opcode",
    [
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16",
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32",
        "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
    ],
)
def test_refused_by_name(opcode):
    with pytest.raises(vgpu.ParseError, match=opcode.replace(".", r"\.")):
        module(f"  {opcode} {{%r0,%r1,%r2,%r3}}, {{%r4,%r5}}, {{%r6,%r7}}, {{%r0,%r1,%r2,%r3}};\n")
