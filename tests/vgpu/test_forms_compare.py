"""Every setp, set, selp, slct, mov and address conversion form against comparisons of exact values."""

import itertools

import forms_float as ff
import pytest
from forms_float import BF16, F16, F32, F64
from forms_kernel import LaneForm, run_lane_forms

WIDTH = {16: "h", 32: "w", 64: "x"}
ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
FLOATING = (*ORDERED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
JOIN = {"": lambda t, c: t, "and": lambda t, c: t & c, "or": lambda t, c: t | c, "xor": lambda t, c: t ^ c}
SAME_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def int_test(kind, cmp):
    """Bits, bits -> 0 or 1."""
    bits = int(kind[1:])

    def value(v):
        return v - (1 << bits) if kind[0] == "s" and v >> (bits - 1) else v

    def test(a, b):
        a, b = value(a), value(b)
        order = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
        return int(order[SAME_UNSIGNED.get(cmp, cmp)])

    return test


def float_test(fmt, cmp, ftz):
    def test(a, b):
        if ftz:
            a, b = fmt.flush(a), fmt.flush(b)
        return int(ff.compare(cmp, fmt.unpack(a), fmt.unpack(b)))

    return test


def int_types(cmp):
    yield from (f"{t}{n}" for t in "us" for n in WIDTH)
    if cmp in ("eq", "ne"):
        yield from (f"b{n}" for n in WIDTH)


def float_types():
    """(format, ftz, register letter, pool letter)."""
    yield from ((F32, False, "w", "f"), (F32, True, "w", "f"), (F64, False, "x", "g"))
    yield from ((F16, False, "h", "e"), (F16, True, "h", "e"), (BF16, False, "h", "b"))


def single_tests():
    """(cmp, type suffix, register, pool, test) of every comparison of two scalars."""
    for cmp in ORDERED:
        for kind in int_types(cmp):
            w = WIDTH[int(kind[1:])]
            yield cmp, f".{kind}", w, w, int_test(kind, cmp)
    for cmp, n in itertools.product(SAME_UNSIGNED, WIDTH):
        yield cmp, f".u{n}", WIDTH[n], WIDTH[n], int_test(f"u{n}", cmp)
    for cmp in FLOATING:
        for fmt, ftz, register, letter in float_types():
            yield cmp, f"{'.ftz' if ftz else ''}.{fmt.name}", register, letter, float_test(fmt, cmp, ftz)


def setp_forms():
    for cmp, tail, r, letter, test in single_tests():
        for op, join in JOIN.items():
            opcode = f"setp.{cmp}{'.' + op if op else ''}{tail}"
            one = letter in "eb"  # a single predicate
            for bang in ("", "!") if op else ("",):
                sources, pools = (r + r + "p", letter + letter + "p") if op else (r + r, letter + letter)

                def reference(a, b, c=0, test=test, join=join, n=bang, one=one):
                    t, c = test(a, b), 1 - c if n else c
                    return (join(t, c),) if one else (join(t, c), join(1 - t, c))

                text = ("{d0}" if one else "{d0}|{d1}") + ", {s0}, {s1}" + (f", {bang}{{s2}}" if op else "")
                yield LaneForm(opcode, "p" if one else "pp", sources, pools, reference, text)
            if not op:
                yield LaneForm(opcode, "p", r + r, letter + letter, test)


def halves(v):
    return v & 0xFFFF, v >> 16


def pair_types():
    yield from ((F16, False, "E"), (F16, True, "E"), (BF16, False, "B"))


def setp_pair_forms():
    for cmp, (fmt, ftz, letter), (op, join) in itertools.product(FLOATING, pair_types(), JOIN.items()):
        test = float_test(fmt, cmp, ftz)

        def reference(a, b, c=0, test=test, join=join):
            return tuple(join(test(x, y), c) for x, y in zip(halves(a), halves(b), strict=True))

        opcode = ".".join(x for x in ("setp", cmp, op, "ftz" if ftz else "", fmt.name + "x2") if x)
        text = "{d0}|{d1}, {s0}, {s1}" + (", {s2}" if op else "")
        sources = ("wwp", letter * 2 + "p") if op else ("ww", letter * 2)
        yield LaneForm(opcode, "pp", *sources, reference, text)


ONE = {"u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "f32": F32.one, "f16": F16.one, "bf16": BF16.one}


def set_forms():
    for cmp, tail, r, letter, test in single_tests():
        kind = tail.rsplit(".", 1)[1]
        if kind in ("u32", "s32", "b32", "f32") and cmp not in SAME_UNSIGNED:
            results = ("u32", "s32", "f32")
        elif kind in ("f16", "bf16") and ".ftz" not in tail:
            results = (kind,)
        else:
            continue
        mode = ".ftz" if ".ftz" in tail else ""
        for result, (op, join) in itertools.product(results, JOIN.items()):
            sources, pools = (r + r + "p", letter + letter + "p") if op else (r + r, letter + letter)

            def reference(a, b, c=0, test=test, join=join, one=ONE[result]):
                return one if join(test(a, b), c) else 0

            opcode = f"set.{cmp}{'.' + op if op else ''}{mode}.{result}.{kind}"
            yield LaneForm(opcode, "h" if result in ("f16", "bf16") else "w", sources, pools, reference)


def set_pair_forms():
    for cmp, fmt, (op, join) in itertools.product(FLOATING, (F16, BF16), JOIN.items()):
        letter = "E" if fmt is F16 else "B"
        test = float_test(fmt, cmp, False)
        for result, one in ((fmt.name + "x2", fmt.one), ("u32", 0xFFFF)):

            def reference(a, b, c=0, test=test, join=join, one=one):
                low, high = (one * join(test(x, y), c) for x, y in zip(halves(a), halves(b), strict=True))
                return low | high << 16

            opcode = ".".join(x for x in ("set", cmp, op, result, fmt.name + "x2") if x)
            sources = ("wwp", letter * 2 + "p") if op else ("ww", letter * 2)
            yield LaneForm(opcode, "w", *sources, reference)


def select_forms():
    kinds = [f"{t}{n}" for t in "bus" for n in WIDTH] + ["f32", "f64"]
    for kind in kinds:
        w = WIDTH[int(kind[1:])]
        yield LaneForm(f"selp.{kind}", w, w + w + "p", w + w + "p", lambda a, b, p: a if p else b)
        text = "{d0}, {s0}, {s1}, !{s2}"
        yield LaneForm(f"selp.{kind}", w, w + w + "p", w + w + "p", lambda a, b, p: b if p else a, text)
        yield LaneForm(f"slct.{kind}.s32", w, w + w + "w", w + w + "w", lambda a, b, c: b if c >> 31 else a)
        for ftz in (False, True):
            if w == "h":
                continue
            test = float_test(F32, "ge", ftz)
            f = lambda a, b, c, t=test: a if t(c, 0) else b  # noqa: E731
            yield LaneForm(f"slct{'.ftz' if ftz else ''}.{kind}.f32", w, w + w + "w", w + w + "f", f)


def move_forms():
    for n, w in WIDTH.items():
        for kind in (f"b{n}", f"u{n}", f"s{n}", *((f"f{n}",) if n > 16 else ())):
            yield LaneForm(f"mov.{kind}", w, w, w, lambda a: a)
    yield LaneForm("mov.pred", "p", "p", "p", lambda a: a)
    yield LaneForm("mov.pred", "p", "p", "p", lambda a: 1 - a, "{d0}, !{s0}")
    for whole, w, part, p in ((32, "w", 16, "h"), (64, "x", 32, "w"), (64, "x", 16, "h")):
        count = whole // part
        pack = lambda *v, s=part: sum(x << s * k for k, x in enumerate(v))  # noqa: E731
        unpack = lambda v, s=part, n=count: tuple(v >> s * k & ((1 << s) - 1) for k in range(n))  # noqa: E731
        text = "{d0}, {{" + ", ".join(f"{{s{k}}}" for k in range(count)) + "}}"
        yield LaneForm(f"mov.b{whole}", w, p * count, p * count, pack, text)
        text = "{{" + ", ".join(f"{{d{k}}}" for k in range(count)) + "}}, {s0}"
        yield LaneForm(f"mov.b{whole}", p * count, w, w, unpack, text)


FAMILIES = ("setp", "setp_pair", "set", "set_pair", "select", "move")


@pytest.mark.parametrize("family", FAMILIES)
def test_forms(family):
    run_lane_forms(list(globals()[f"{family}_forms"]()))
