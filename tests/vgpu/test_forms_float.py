"""Every f32, f64, f16 and bf16 arithmetic form against exact arithmetic rounded once; approximations within one ulp."""

import math

import forms_float as ff
import pytest
from forms_float import BF16, F16, F32, F64
from forms_kernel import LaneForm, run_lane_forms

LETTER = {"f32": "f", "f64": "g", "f16": "e", "bf16": "b"}
REGISTER = {"f32": "w", "f64": "x", "f16": "h", "bf16": "h"}


def finish(fmt, bits, flags):
    if "ftz" in flags:
        bits = fmt.flush(bits)
    if "sat" in flags:
        bits = fmt.saturate(bits)
    if "relu" in flags:
        bits = fmt.relu(bits)
    return bits


def take(fmt, bits, flags):
    return fmt.unpack(fmt.flush(bits) if "ftz" in flags else bits)


def exact(operation, fmt, mode, flags):
    """Bits -> bits of an operation rounded once."""

    def reference(*sources):
        values = [take(fmt, s, flags) for s in sources]
        sticky = False
        if operation == "add":
            v = ff.add(*values, mode)
        elif operation == "sub":
            v = ff.add(values[0], ff.negative(values[1]), mode)
        elif operation == "mul":
            v = ff.multiply(*values)
        elif operation == "fma":
            v = ff.fused(*values, mode)
        elif operation == "div":
            v, sticky = ff.divide(*values)
        elif operation == "rcp":
            v, sticky = ff.divide((0, 1, 0), values[0])
        else:
            v, sticky = ff.square_root(values[0])
        return finish(fmt, fmt.pack(v, mode, sticky), flags)

    return reference


def nan_alike(fmt):
    """Any NaN will do where the ISA does not say which."""

    def same(have, want):
        return have == want or (fmt.is_nan(have[0]) and fmt.is_nan(want[0]))

    return same


def lane_form(name, fmt, sources, reference, same=None):
    r, letter = REGISTER[fmt.name], LETTER[fmt.name]
    return LaneForm(name, r, r * sources, letter * sources, reference, same=same)


def rounded(name, operation, fmt, sources, flag_sets, plain):
    same = nan_alike(fmt) if fmt is F64 else None
    for mode in (("",) if plain else ()) + ("rn", "rz", "rm", "rp"):
        for flags in flag_sets:
            opcode = ".".join(x for x in (name, mode, *flags, fmt.name) if x)
            yield lane_form(opcode, fmt, sources, exact(operation, fmt, mode or "rn", flags), same)


def arithmetic_forms():
    with_sat = ((), ("ftz",), ("sat",), ("ftz", "sat"))
    for name, operation, sources, plain in (
        ("add", "add", 2, True),
        ("sub", "sub", 2, True),
        ("mul", "mul", 2, True),
        ("fma", "fma", 3, False),
        ("mad", "fma", 3, False),
    ):
        yield from rounded(name, operation, F32, sources, with_sat, plain)
        yield from rounded(name, operation, F64, sources, ((),), plain)
    for name, sources in (("div", 2), ("rcp", 1), ("sqrt", 1)):
        yield from rounded(name, name, F32, sources, ((), ("ftz",)), False)
        yield from rounded(name, name, F64, sources, ((),), False)


def pick(fmt, largest, flags):
    """min and max: a number beats NaN, -0 lies below +0."""

    def reference(a, b):
        if "ftz" in flags:
            a, b = fmt.flush(a), fmt.flush(b)
        sign = (a ^ b) & fmt.sign
        if "xorsign" in flags:
            a, b = a & ~fmt.sign, b & ~fmt.sign
        nans = [fmt.is_nan(v) for v in (a, b)]
        if all(nans) or ("NaN" in flags and any(nans)):
            return fmt.nan
        if any(nans):
            r = b if nans[0] else a
        else:
            r = (max if largest else min)(a, b, key=fmt.key)
        return r & ~fmt.sign | sign if "xorsign" in flags else r

    return reference


def pick_forms():
    xor = ("xorsign", "abs")
    sets = {
        "f32": ((), ("ftz",), ("NaN",), ("ftz", "NaN"), xor, ("ftz", *xor), ("NaN", *xor), ("ftz", "NaN", *xor)),
        "f64": ((),),
        "f16": ((), ("ftz",), ("NaN",), ("ftz", "NaN"), xor, ("NaN", *xor)),
        "bf16": ((), ("NaN",), xor, ("NaN", *xor)),
    }
    for fmt in (F32, F64, F16, BF16):
        for flags in sets[fmt.name]:
            for name in ("min", "max"):
                opcode = ".".join((name, *flags, fmt.name))
                same = nan_alike(fmt) if fmt is F64 else None
                yield from scalar_and_pair(opcode, fmt, 2, pick(fmt, name == "max", flags), same)


def halves_alike(fmt):
    one = nan_alike(fmt)
    return lambda have, want: all(one((have[0] >> s & 0xFFFF,), (want[0] >> s & 0xFFFF,)) for s in (0, 16))


def scalar_and_pair(opcode, fmt, sources, reference, same=None):
    yield lane_form(opcode, fmt, sources, reference, same)
    if fmt.bits != 16:
        return

    def pair(*values):
        low, high = (reference(*(v >> s & 0xFFFF for v in values)) for s in (0, 16))
        return low | high << 16

    letter = "E" if fmt is F16 else "B"
    both = None
    if same:
        both = lambda have, want: all(same((have[0] >> s & 0xFFFF,), (want[0] >> s & 0xFFFF,)) for s in (0, 16))  # noqa: E731
    yield LaneForm(opcode + "x2", "w", "w" * sources, letter * sources, pair, same=both)


def half_forms():
    for fmt in (F16, BF16):
        sets = ((), ("ftz",), ("sat",), ("ftz", "sat")) if fmt is F16 else ((),)
        for name in ("add", "sub", "mul"):
            for mode in ("", "rn"):
                for flags in sets:
                    opcode = ".".join(x for x in (name, mode, *flags, fmt.name) if x)
                    yield from scalar_and_pair(opcode, fmt, 2, exact(name, fmt, "rn", flags))
        for flags in (*sets, ("relu",), *((("ftz", "relu"),) if fmt is F16 else ())):
            yield from scalar_and_pair(".".join(("fma.rn", *flags, fmt.name)), fmt, 3, exact("fma", fmt, "rn", flags))


def sign_forms():
    for fmt in (F32, F64, F16, BF16):
        for flags in ((), ("ftz",)) if fmt in (F32, F16) else ((),):
            for name in ("abs", "neg"):

                def reference(a, fmt=fmt, flags=flags, name=name):
                    a = fmt.flush(a) if "ftz" in flags else a
                    return a & ~fmt.sign if name == "abs" else a ^ fmt.sign

                opcode = ".".join((name, *flags, fmt.name))
                yield from scalar_and_pair(opcode, fmt, 1, reference, nan_alike(fmt))
    for fmt in (F32, F64):
        f = lambda a, b, fmt=fmt: a & fmt.sign | b & ~fmt.sign  # noqa: E731
        yield lane_form(f"copysign.{fmt.name}", fmt, 2, f)


def test_class(fmt, name, bits):
    magnitude = bits & ~fmt.sign
    return {
        "finite": magnitude < fmt.infinity,
        "infinite": magnitude == fmt.infinity,
        "number": magnitude <= fmt.infinity,
        "notanumber": magnitude > fmt.infinity,
        "normal": fmt.smallest_normal <= magnitude < fmt.infinity or magnitude == 0,  # zeros count as normal
        "subnormal": 0 < magnitude < fmt.smallest_normal,
    }[name]


test_class.__test__ = False


def class_forms():
    for fmt in (F32, F64):
        for name in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            f = lambda a, fmt=fmt, name=name: int(test_class(fmt, name, a))  # noqa: E731
            yield LaneForm(f"testp.{name}.{fmt.name}", "p", REGISTER[fmt.name], LETTER[fmt.name], f)


# ---- approximations: computed exactly here, so a wrong last place of the double on the way is all that may differ ----


def exp2(x):
    return 0.0 if x < -1100 else math.inf if x >= 1024 else 2.0**x


def log2(x):
    return -math.inf if x == 0 else math.log2(x) if x > 0 else math.nan


def reciprocal_root(x):
    return math.copysign(math.inf, x) if x == 0 else 1 / math.sqrt(x) if x > 0 else math.nan


def reciprocal(x):
    return math.copysign(math.inf, x) if x == 0 else 1 / x


FUNCTIONS = {
    "ex2": exp2,
    "lg2": log2,
    "rcp": reciprocal,
    "rsqrt": reciprocal_root,
    "sqrt": lambda x: x if x == 0 else math.sqrt(x) if x > 0 else math.nan,
    "sin": lambda x: math.sin(x) if math.isfinite(x) else math.nan,
    "cos": lambda x: math.cos(x) if math.isfinite(x) else math.nan,
    "tanh": math.tanh,
}


def approximate(function, fmt, flags):
    def reference(a):
        if "ftz" in flags:
            a = fmt.flush(a)
        return finish(fmt, ff.from_float(fmt, function(ff.to_float(fmt, a))), flags)

    return reference


def within_one_place(fmt):
    def same(have, want):
        have, want = have[0], want[0]
        if have == want or (fmt.is_nan(have) and fmt.is_nan(want)):
            return True
        if fmt.is_nan(have) or fmt.is_nan(want) or fmt.infinity in (have & ~fmt.sign, want & ~fmt.sign):
            return False
        return abs(fmt.key(have) - fmt.key(want)) <= 1

    return same


def approximate_forms():
    for name, function in FUNCTIONS.items():
        for flags in ((), ("ftz",)) if name != "tanh" else ((),):
            opcode = ".".join((name, "approx", *flags, "f32"))
            yield lane_form(opcode, F32, 1, approximate(function, F32, flags), within_one_place(F32))
    for fmt, flags, name in ((F16, (), "ex2"), (BF16, ("ftz",), "ex2"), (F16, (), "tanh"), (BF16, (), "tanh")):
        opcode = ".".join((name, "approx", *flags, fmt.name))
        yield from scalar_and_pair(opcode, fmt, 1, approximate(FUNCTIONS[name], fmt, flags), within_one_place(fmt))
    for kind in ("approx", "full"):
        for flags in ((), ("ftz",)):
            f = exact("div", F32, "rn", flags)
            yield lane_form(".".join(("div", kind, *flags, "f32")), F32, 2, f, within_one_place(F32))


def upper(bits):
    return bits & 0xFFFFFFFF00000000


def double_approximation_forms():
    """The f64 ones look at the upper halves only, and leave the lower half of the result zero."""
    for name in ("rcp", "rsqrt"):
        f = FUNCTIONS[name]

        def reference(a, f=f):
            return upper(F64.flush(ff.from_float(F64, f(ff.to_float(F64, F64.flush(upper(a)))))))

        yield lane_form(f"{name}.approx.ftz.f64", F64, 1, reference, nan_alike(F64))
    f = lambda a: ff.from_float(F64, reciprocal_root(ff.to_float(F64, a)))  # noqa: E731
    yield lane_form("rsqrt.approx.f64", F64, 1, f, within_one_place(F64))


FAMILIES = ("arithmetic", "pick", "half", "sign", "class", "approximate", "double_approximation")


@pytest.mark.parametrize("seed", (0, 1))
@pytest.mark.parametrize("family", FAMILIES)
def test_forms(family, seed):
    run_lane_forms(list(globals()[f"{family}_forms"]()), seed)
