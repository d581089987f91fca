"""Warp instructions per second and core of the virtual GPU, on ordinary code with every check and counter on.

    python -m bench.bench_vgpu            # fails when ordinary code runs slower than the gate
    python -m bench.bench_vgpu --no-gate

The kernels are PTX text, so that no compiler decides what is measured. One core; the best of several launches.
"""

import argparse
import sys

import numpy as np

from pagedkern import vgpu

GATE = 10e6  # warp instructions per second and core
BLOCKS, THREADS = 16, 256

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
REGISTERS = """
  .reg .pred %p<8>;
  .reg .b32 %r<64>;
  .reg .f32 %f<64>;
  .reg .b64 %d<16>;
"""
START = """
  ld.param.u64 %d0, [p0];
  ld.param.u64 %d1, [p1];
  ld.param.u32 %r0, [p2];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mad.lo.u32 %r4, %r2, %r3, %r1;
  mov.u32 %r5, 0;
"""


def loop(body):
    """`body` %r0 times, with the count in %r5."""
    return f"LOOP:\n{body}\n  add.u32 %r5, %r5, 1;\n  setp.lt.u32 %p1, %r5, %r0;\n  @%p1 bra LOOP;\n"


def kernel(body, shared=""):
    params = ".param .u64 p0, .param .u64 p1, .param .u32 p2"
    return vgpu.Module(f"{HEAD}{shared}\n.visible .entry k({params})\n{{{REGISTERS}{START}{body}\n  ret;\n}}\n")


def float_loop():
    start = "".join(f"  cvt.rn.f32.u32 %f{k}, %r4;\n" for k in range(8))
    chains = "".join(f"  fma.rn.f32 %f{k}, %f{k}, 0f3F7FF000, 0f3F000000;\n" for k in range(8))
    total = "".join(f"  add.f32 %f0, %f0, %f{k};\n" for k in range(1, 8))
    store = "  mul.wide.u32 %d2, %r4, 4;\n  add.s64 %d2, %d1, %d2;\n  st.global.f32 [%d2], %f0;\n"
    return kernel(start + loop(chains) + total + store), 2000


def integer_loop():
    """Index arithmetic as compilers emit it, with 32-bit and 64-bit addresses."""
    body = """
  mad.lo.u32 %r10, %r5, %r3, %r4;
  shl.b32 %r11, %r10, 2;
  and.b32 %r12, %r11, 4092;
  xor.b32 %r13, %r12, %r1;
  mul.wide.u32 %d2, %r13, 4;
  add.s64 %d3, %d0, %d2;
  cvt.u32.u64 %r14, %d3;
  shf.r.wrap.b32 %r15, %r14, %r10, 7;
  setp.gt.s32 %p2, %r15, %r10;
  selp.b32 %r16, %r15, %r13, %p2;
  add.u32 %r4, %r4, %r16;
"""
    store = "  mov.u32 %r2, %ctaid.x;\n  mad.lo.u32 %r6, %r2, %r3, %r1;\n  mul.wide.u32 %d2, %r6, 4;\n"
    return kernel(loop(body) + store + "  add.s64 %d2, %d1, %d2;\n  st.global.u32 [%d2], %r4;\n"), 1500


def global_copy(width):
    """out[i] = in[i], `width` words of 4 bytes per thread and step, eight times over the array."""
    registers = "{%r20,%r21,%r22,%r23}" if width == 4 else "%r20"
    kind = "v4.u32" if width == 4 else "u32"
    body = f"""
  and.b32 %r6, %r5, 127;
  mad.lo.u32 %r7, %r6, {BLOCKS * THREADS}, %r4;
  mul.wide.u32 %d2, %r7, {4 * width};
  add.s64 %d3, %d0, %d2;
  add.s64 %d4, %d1, %d2;
  ld.global.{kind} {registers}, [%d3];
  st.global.{kind} [%d4], {registers};
"""
    return kernel(loop(body)), 1024


def shared_reduction():
    """A block's tree sum in shared memory, again and again."""
    steps = ""
    for half in (128, 64, 32, 16, 8, 4, 2, 1):
        steps += f"""
  setp.ge.u32 %p2, %r1, {half};
  @%p2 bra SKIP{half};
  ld.shared.f32 %f1, [%r10];
  ld.shared.f32 %f2, [%r10+{4 * half}];
  add.f32 %f1, %f1, %f2;
  st.shared.f32 [%r10], %f1;
SKIP{half}:
  bar.sync 0;
"""
    start = "  mov.u32 %r9, room;\n  shl.b32 %r8, %r1, 2;\n  add.u32 %r10, %r9, %r8;\n  cvt.rn.f32.u32 %f3, %r1;\n"
    body = "  st.shared.f32 [%r10], %f3;\n  bar.sync 0;\n" + steps
    store = "  mul.wide.u32 %d2, %r4, 4;\n  add.s64 %d2, %d1, %d2;\n  st.global.f32 [%d2], %f3;\n"
    return kernel(start + loop(body) + store, f".shared .align 16 .b8 room[{4 * THREADS}];"), 150


def mma_loop():
    """Dense m16n8k16 in bf16: tensor work, which no gate is set for."""
    start = "".join(f"  mov.u32 %r{k}, 1065369472;\n" for k in range(20, 26))
    start += "".join(f"  mov.f32 %f{k}, 0f00000000;\n" for k in range(4))
    body = (
        "  mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0,%f1,%f2,%f3}, "
        "{%r20,%r21,%r22,%r23}, {%r24,%r25}, {%f0,%f1,%f2,%f3};\n"
    )
    store = "  mul.wide.u32 %d2, %r4, 4;\n  add.s64 %d2, %d1, %d2;\n  st.global.f32 [%d2], %f0;\n"
    return kernel(start + loop(4 * body) + store), 300


CASES = {
    "float loop": (float_loop, True),
    "integer and address loop": (integer_loop, True),
    "global copy, 4 bytes a lane": (lambda: global_copy(1), True),
    "global copy, 16 bytes a lane": (lambda: global_copy(4), True),
    "shared-memory reduction": (shared_reduction, True),
    "mma.sync loop": (mma_loop, False),
}


def measure(make, checks, repeats):
    """Warp instructions per second, and the last report."""
    module, count = make()
    words = 128 * BLOCKS * THREADS * 4
    source, out = np.zeros(words, np.uint32), np.zeros(words, np.uint32)
    best, report = 0.0, None
    with vgpu.session(threads=1, checks=checks):
        for _ in range(repeats):
            report = module.launch("k", BLOCKS, THREADS, [source, out, count])
            best = max(best, report["warp_instructions"] / report["seconds"])
    return best, report


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-gate", action="store_true", help="only print")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{'million warp instructions per second and core':<48}{'all checks':>12}{'no checks':>12}")
    slow = []
    for name, (make, gated) in CASES.items():
        checked, report = measure(make, "all", options.repeats)
        plain, _ = measure(make, "none", options.repeats)
        flops = report["tensor_flops"] / report["seconds"] / 1e9
        note = f"   {flops:.1f} GFLOP/s" if flops else ""
        print(f"{name:<48}{checked / 1e6:>12.1f}{plain / 1e6:>12.1f}{note}")
        if gated and checked < GATE:
            slow.append(name)
    if slow and not options.no_gate:
        sys.exit(f"below {GATE / 1e6:.0f} million warp instructions per second and core: {', '.join(slow)}")


if __name__ == "__main__":
    main()
