"""Every atom and red form: per-thread cells against exact arithmetic, then all threads on one cell."""

import forms_float as ff
import numpy as np
import pytest
from forms_float import BF16, F16, F32, F64
from forms_kernel import HEAD, REGISTERS, LaneForm, run_lane_forms
from forms_memory import places, vector

from pagedkern import vgpu


def signed(v, bits):
    return v - (1 << bits) if v >> (bits - 1) else v


def add_float(fmt, a, b):
    return fmt.pack(ff.add(fmt.unpack(a), fmt.unpack(b)))


def add_pair(fmt, a, b):
    return sum(add_float(fmt, a >> s & 0xFFFF, b >> s & 0xFFFF) << s for s in (0, 16))


def add_flushed(a, b):
    """f32 sums in global memory lose subnormals; in shared memory they keep them."""
    return F32.flush(add_float(F32, F32.flush(a), F32.flush(b)))


def operations(place):
    """(opcode tail, register, pool of the cell, pool of the value, function of old and value)."""
    shared = "shared" in place[4]
    for bits, w in ((32, "w"), (64, "x")):
        keep = (1 << bits) - 1
        for kind in ("u", "s"):
            if (kind, bits) != ("s", 64):
                yield f"add.{kind}{bits}", w, w, w, lambda a, b, k=keep: a + b & k
            order = (lambda v: v) if kind == "u" else (lambda v, n=bits: signed(v, n))
            yield f"min.{kind}{bits}", w, w, w, lambda a, b, o=order: min(a, b, key=o)
            yield f"max.{kind}{bits}", w, w, w, lambda a, b, o=order: max(a, b, key=o)
        yield f"and.b{bits}", w, w, w, lambda a, b: a & b
        yield f"or.b{bits}", w, w, w, lambda a, b: a | b
        yield f"xor.b{bits}", w, w, w, lambda a, b: a ^ b
    yield "inc.u32", "w", "w", "w", lambda a, b: 0 if a >= b else a + 1
    yield "dec.u32", "w", "w", "w", lambda a, b: b if a == 0 or a > b else a - 1
    yield "add.f32", "w", "f", "f", (lambda a, b: add_float(F32, a, b)) if shared else add_flushed
    yield "add.f64", "x", "g", "g", lambda a, b: add_float(F64, a, b)
    yield "add.noftz.f16", "h", "e", "e", lambda a, b: add_float(F16, a, b)
    yield "add.noftz.bf16", "h", "b", "b", lambda a, b: add_float(BF16, a, b)
    yield "add.noftz.f16x2", "w", "E", "E", lambda a, b: add_pair(F16, a, b)
    yield "add.noftz.bf16x2", "w", "B", "B", lambda a, b: add_pair(BF16, a, b)


def exchanges():
    for bits, w in ((32, "w"), (64, "x")):
        yield f"exch.b{bits}", w


BITS = {"h": 16, "w": 32, "x": 64}


def same_nan(fmt):
    def same(have, want):
        return all(h == w or (fmt.is_nan(h) and fmt.is_nan(w)) for h, w in zip(have, want, strict=True))

    return same


def cell_form(root, opcode, register, pools, function, place, text, sources=None):
    """d0: what the instruction returns (atom), last: what the cell holds afterwards."""
    space, module, setup, address, through = place
    bits = BITS[register]
    sources = sources or register * len(pools)
    returns = root == "atom"

    def reference(old, *values):
        new = function(old, *values)
        return (old, new) if returns else (new,)

    last = "{d1}" if returns else "{d0}"
    around = f"{{{{ {setup}st{through}.b{bits} [a], {{s0}}; OP; ld{through}.b{bits} {last}, [a]; }}}}"
    operands = ("{d0}, " if returns else "") + f"[{address}], {text}"
    same = same_nan(F64) if "f64" in opcode else None
    return LaneForm(opcode, register * (1 + returns), sources, pools, reference, operands, same, around, module)


def atomic_places():
    return [p for p in places() if "local" not in p[4]]


SPELLINGS = ("", ".relaxed.gpu", ".acq_rel.gpu", ".acquire.cta", ".release.sys", ".cluster", ".relaxed.cluster")


def read_modify_write_forms():
    for place in atomic_places():
        for k, (tail, register, cell, value, function) in enumerate(operations(place)):
            for root in ("atom", "red"):
                for spelling in ("", SPELLINGS[k % len(SPELLINGS)]):
                    if root == "red" and "acq" in spelling:
                        spelling = ".relaxed.gpu"
                    opcode = f"{root}{spelling}{place[0]}.{tail}"
                    yield cell_form(root, opcode, register, cell + value, function, place, "{s1}")


def exchange_forms():
    for place in atomic_places():
        for tail, w in exchanges():
            yield cell_form("atom", f"atom{place[0]}.{tail}", w, w + w, lambda a, b: b, place, "{s1}")
        for bits, w in ((16, "h"), (32, "w"), (64, "x")):
            f = lambda old, e, v: v if old == e else old  # noqa: E731
            yield cell_form("atom", f"atom{place[0]}.cas.b{bits}", w, w * 3, f, place, "{s1}, {s2}")
            # cells that hold what is expected, whatever the values
            same = lambda old, v: v  # noqa: E731
            yield cell_form("atom", f"atom{place[0]}.cas.b{bits}", w, w + w, same, place, "{s0}, {s1}")


def vector_forms():
    _, module, setup, address, through = next(p for p in places() if p[0] == ".global")
    kinds = [("add.v2.f32", "f", 2, add_flushed), ("add.v4.f32", "f", 4, add_flushed)]
    for fmt, letter in ((F16, "E"), (BF16, "B")):
        for count in (2, 4):
            kinds.append((f"add.noftz.v{count}.{fmt.name}x2", letter, count, lambda a, b, f=fmt: add_pair(f, a, b)))
    for tail, letter, count, function in kinds:
        for root in ("atom", "red"):
            returns = root == "atom"

            def reference(*v, f=function, n=count, r=returns):
                new = tuple(f(a, b) for a, b in zip(v[:n], v[n:], strict=True))
                return (*v[:n], *new) if r else new

            names = [f"{{s{count + k}}}" for k in range(count)]
            out = [f"{{d{k}}}" for k in range(count * (1 + returns))]
            fill = "".join(f"st.global.b32 [a+{4 * k}], {{s{k}}}; " for k in range(count))
            read = "".join(f"ld.global.b32 {out[-count + k]}, [a+{4 * k}]; " for k in range(count))
            operands = (vector(out[:count]) + ", " if returns else "") + f"[{address}], {vector(names)}"
            around = f"{{{{ {setup}{fill}OP; {read}}}}}"
            opcode = f"{root}.global.{tail}"
            sources = "w" * 2 * count
            yield LaneForm(
                opcode, "w" * len(out), sources, letter * 2 * count, reference, operands, None, around, module
            )


@pytest.mark.parametrize("family", ("read_modify_write", "exchange", "vector"))
def test_forms(family):
    run_lane_forms(list(globals()[f"{family}_forms"]()))


THREADS, BLOCKS = 96, 5
CONTENDED = {
    "add.u32": (0, lambda v: v.sum()),
    "add.u64": (0, lambda v: v.sum()),
    "max.s32": (0, lambda v: v.max()),
    "min.u32": (2**31, lambda v: v.min()),
    "or.b32": (0, np.bitwise_or.reduce),
    "and.b32": (2**32 - 1, np.bitwise_and.reduce),
    "xor.b64": (0, np.bitwise_xor.reduce),
    "inc.u32": (0, lambda v: len(v)),
    "add.f32": (0, lambda v: np.float32(v.sum()).view(np.uint32)),
}


@pytest.mark.parametrize("tail", CONTENDED)
@pytest.mark.parametrize("seed", (0, 1, 2))
def test_one_cell_for_all(tail, seed):
    """Threads of several blocks on one cell: nothing is lost, and the returned values are those of some order."""
    start, total = CONTENDED[tail]
    bits = 64 if tail.endswith("64") else 32
    kind = "f32" if tail == "add.f32" else f"u{bits}"
    values = np.random.default_rng(seed).integers(1, 1000, THREADS * BLOCKS)
    given = np.full(values.shape, 2**32 - 1, np.uint64) if tail == "inc.u32" else values.astype(np.uint64)
    if kind == "f32":
        given = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    register = "%r5" if bits == 32 else "%d5"
    body = "  ld.param.u64 %d0, [cell];\n  ld.param.u64 %d1, [values];\n  ld.param.u64 %d2, [olds];\n"
    body += "  mov.u32 %r0, %tid.x;\n  mov.u32 %r1, %ctaid.x;\n"
    body += f"  mad.lo.u32 %r0, %r1, {THREADS}, %r0;\n  mad.wide.u32 %d1, %r0, 8, %d1;\n"
    body += f"  mad.wide.u32 %d2, %r0, 8, %d2;\n  ld.global.b{bits} {register}, [%d1];\n"
    body += f"  atom.global.{tail} {register}, [%d0], {register};\n  st.global.b{bits} [%d2], {register};\n"
    head = ".visible .entry k(.param .u64 cell, .param .u64 values, .param .u64 olds)"
    cell, olds = np.array([start], np.uint64), np.zeros(len(values), np.uint64)
    with vgpu.session(seed=seed):
        vgpu.Module(f"{HEAD}{head}\n{{\n{REGISTERS}{body}  ret;\n}}").launch("k", BLOCKS, THREADS, [cell, given, olds])
    assert int(cell[0]) == int(total(values))
    if tail in ("add.u32", "inc.u32"):
        assert len(set(olds.tolist())) == len(values)
