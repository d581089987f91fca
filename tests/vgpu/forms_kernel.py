"""Executes many instruction forms at once: registers in, registers out, one kernel for forms with the same operands."""

import dataclasses
import random
from collections.abc import Callable

import numpy as np
from forms_float import FORMATS

from pagedkern import vgpu

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
THREADS = 307  # nine full warps and one of 19 lanes: both ways the executor loops
BITS = {"p": 1, "h": 16, "w": 32, "x": 64}
REGISTERS = """  .reg .pred %p<100>;
  .reg .b16 %h<100>;
  .reg .b32 %r<200>;
  .reg .b64 %d<200>;
"""
PREFIX = {"p": "%p", "h": "%h", "w": "%r", "x": "%d"}


@dataclasses.dataclass
class LaneForm:
    """A form whose lanes are independent.

    to, sources: one letter per register, as in BITS. pools: which values each source takes (see `pool`).
    reference: source bits -> bits of each destination (an int, or a tuple). text: the operands in PTX.
    same: (got, want) -> whether a result is right, where more than one is. around: statements with the form as OP.
    module: declarations it needs at module scope.
    """

    name: str
    to: str
    sources: str
    pools: str
    reference: Callable
    text: str = ""
    same: Callable | None = None
    around: str = "OP;"
    module: str = ""

    def operands(self):
        names = [f"{{d{k}}}" for k in range(len(self.to))] + [f"{{s{k}}}" for k in range(len(self.sources))]
        return self.text or ", ".join(names)


def special_ints(bits):
    top = 1 << (bits - 1)
    small = [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 127, 128, 255, 256, 257]
    edges = [top, top - 1, top + 1, 2 * top - 1, 2 * top - 2, top - 2, 2 * top - 3]
    patterns = [0x5555555555555555, 0xAAAAAAAAAAAAAAAA, 0x0123456789ABCDEF, 0xFEDCBA9876543210]
    return [v & (2 * top - 1) for v in small + edges + patterns]


def special_floats(fmt):
    one = fmt.one
    half = one - (1 << fmt.mantissa)
    two = one + (1 << fmt.mantissa)
    plain = [
        *(0, 1, 2, 3, fmt.smallest_normal - 1, fmt.smallest_normal, fmt.smallest_normal + 1),
        *(half, half - 1, half + 1, one, one - 1, one + 1, one + (1 << (fmt.mantissa - 1)), two, two + 1),
        *(fmt.largest, fmt.largest - 1, fmt.infinity, fmt.infinity + 1, fmt.nan, fmt.infinity | fmt.nan >> 2 & 0x15),
    ]
    return plain + [v | fmt.sign for v in plain]


def pool(kind, count, rng):
    """`count` values of a kind: integers of a width (h w x), floats (e f16, b bf16, f f32, g f64, E and B pairs
    of halves), n shift amounts and other small numbers, p predicates. Special values first."""
    if kind == "p":
        return [rng.getrandbits(1) for _ in range(count)]
    if kind in "hwx":
        bits = BITS[kind]
        values = special_ints(bits)
        extra = [rng.getrandbits(rng.choice((bits, bits, bits // 2, 8))) for _ in range(count)]
    elif kind == "n":
        values = special_ints(32)
        extra = [rng.getrandbits(rng.choice((5, 6, 7))) for _ in range(count)]
    elif kind in "EB":
        singles = pool("e" if kind == "E" else "b", 4 * count, rng)
        return [rng.choice(singles) | rng.choice(singles) << 16 for _ in range(count)]
    else:
        fmt = FORMATS[{"e": "f16", "b": "bf16", "f": "f32", "g": "f64"}[kind]]
        values = special_floats(fmt)
        extra = []
        for k in range(count):
            bits = rng.getrandbits(fmt.bits)
            if k % 3:  # magnitudes near one another, where sums cancel and integers lie
                field = (fmt.one >> fmt.mantissa) + rng.randint(-4, min(34, fmt.one >> fmt.mantissa))
                bits = bits & ~fmt.infinity | field << fmt.mantissa
            extra.append(bits)
    rng.shuffle(extra)
    return values + extra[: max(0, count - len(values))]


def source_values(pools, seed):
    """One row per source, THREADS columns: special values against special values, then a mixture."""
    rng = random.Random(f"{pools} {seed}")
    rows = []
    for k, kind in enumerate(pools):
        values = pool(kind, THREADS, rng)
        if k:
            rng.shuffle(values)
        rows.append(values[:THREADS])
    for lane in range(len(pools) > 1 and THREADS):  # equal operands, and neighbours
        if lane % 11 == 5 and pools[0] == pools[1]:
            rows[1][lane] = rows[0][lane]
    return rows


def load(kind, k):
    """PTX that brings source k of this thread from the source array into its register."""
    at = f"[%d1+{8 * THREADS * k}]"
    if kind == "p":
        return f"  ld.global.u32 %r99, {at};\n  setp.ne.u32 %p{k + 10}, %r99, 0;\n"
    return f"  ld.global.u{BITS[kind]} {PREFIX[kind]}{k + 10}, {at};\n"


def store(kind, register, slot):
    at = f"[%d2+{8 * THREADS * slot}]"
    if kind == "p":
        return f"  selp.u32 %r99, 1, 0, {register};\n  st.global.u32 {at}, %r99;\n"
    return f"  st.global.u{BITS[kind]} {at}, {register};\n"


def lane_kernel(name, forms):
    """A kernel that runs every form on the same sources."""
    body = f".visible .entry {name}(.param .u64 source, .param .u64 result)\n{{\n{REGISTERS}"
    body += "  mov.u32 %r0, %tid.x;\n  mul.wide.u32 %d0, %r0, 8;\n  ld.param.u64 %d1, [source];\n"
    body += "  ld.param.u64 %d2, [result];\n  add.s64 %d1, %d1, %d0;\n  add.s64 %d2, %d2, %d0;\n"
    for k, kind in enumerate(forms[0].sources):
        body += load(kind, k)
    slot = 0
    for form in forms:
        names = {f"s{k}": f"{PREFIX[kind]}{k + 10}" for k, kind in enumerate(form.sources)}
        names |= {f"d{k}": f"{PREFIX[kind]}{k + 50}" for k, kind in enumerate(form.to)}
        body += "  " + form.around.replace("OP", f"{form.name} {form.operands()}").format(**names) + "\n"
        for k, kind in enumerate(form.to):
            body += store(kind, names[f"d{k}"], slot)
            slot += 1
    return body + "  ret;\n}\n"


def batches(forms, most=48):
    """Forms with the same sources, in groups of at most `most`."""
    groups = {}
    for form in forms:
        groups.setdefault((form.sources, form.pools), []).append(form)
    return [group[k : k + most] for group in groups.values() for k in range(0, len(group), most)]


def lane_module(forms):
    """(PTX text, batches): one kernel k<n> per batch."""
    parts = batches(forms)
    declarations = "".join(dict.fromkeys(form.module for form in forms))
    return HEAD + declarations + "\n".join(lane_kernel(f"k{n}", batch) for n, batch in enumerate(parts)), parts


def wrong_lanes(form, rows, got):
    """The lanes where the form's result is not the reference's, as text."""
    problems = []
    for lane in range(THREADS):
        sources = [row[lane] for row in rows]
        want = form.reference(*sources)
        want = want if isinstance(want, tuple) else (want,)
        have = tuple(int(row[lane]) for row in got)
        same = form.same(have, want) if form.same else have == want
        if not same:
            shown = [", ".join(f"{v:#x}" for v in values) for values in (sources, have, want)]
            problems.append(f"{form.name}({shown[0]}): got {shown[1]}, expected {shown[2]}")
    return problems


def run_lane_forms(forms, seed=0):
    """Executes the forms and compares every lane with the reference; fails naming all forms that differ."""
    text, parts = lane_module(forms)
    module = vgpu.Module(text)
    problems = []
    for n, batch in enumerate(parts):
        rows = source_values(batch[0].pools, seed)
        results = np.zeros((sum(len(f.to) for f in batch), THREADS), np.uint64)
        source = np.array(rows, np.uint64)
        with vgpu.session(checks=("uninitialized",), counters=False, threads=1):
            module.launch(f"k{n}", 1, THREADS, [source, results])
        at = 0
        for form in batch:
            wrong = wrong_lanes(form, rows, results[at : at + len(form.to)])
            if wrong:
                problems.append(f"{len(wrong)} wrong, first: " + "\n    ".join(wrong[:3]))
            at += len(form.to)
    assert not problems, f"{len(problems)} forms differ:\n" + "\n".join(problems)
