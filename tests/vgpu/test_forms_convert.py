"""Every cvt form against exact values rounded once."""

import itertools

import forms_float as ff
import pytest
from forms_float import BF16, F16, F32, F64, TF32, Format
from forms_kernel import BITS, LaneForm, run_lane_forms
from test_forms_float import nan_alike

INTS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
LETTER = {"f16": "e", "bf16": "b", "f32": "f", "f64": "g"}
REGISTER = {8: "h", 16: "h", 32: "w", 64: "x"}


def int_value(kind, bits):
    width = int(kind[1:])
    bits &= (1 << width) - 1
    return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits


def bounds(kind):
    width = int(kind[1:])
    return (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind[0] == "s" else (0, (1 << width) - 1)


def clamp(kind, n):
    low, high = bounds(kind)
    return max(low, min(high, n))


def int_bits(kind, n, register):
    """Sign- or zero-extended into the register."""
    return int_value(kind, n) & ((1 << BITS[register]) - 1)


def kinds_of(kind):
    """Registers that may hold an integer type: its own width and every wider one."""
    width = max(16, int(kind[1:]))
    return [r for r in "hwx" if BITS[r] >= width]


def int_to_int_forms():
    for to, source in itertools.product(INTS, INTS):
        for sat in (False, True):
            low, high = bounds(source)
            if sat and bounds(to)[0] <= low and high <= bounds(to)[1]:
                continue  # nothing to saturate: PTX has no such form
            for d, s in itertools.product(kinds_of(to), kinds_of(source)):

                def reference(a, to=to, source=source, sat=sat, d=d):
                    n = int_value(source, a)
                    return int_bits(to, clamp(to, n) if sat else n, d)

                yield LaneForm(f"cvt{'.sat' if sat else ''}.{to}.{source}", d, s, s, reference)


def float_to_int(fmt, to, mode, ftz):
    def reference(a):
        v = fmt.unpack(fmt.flush(a) if ftz else a)
        width = int(to[1:])
        if v is None:
            return 1 << (width - 1) if fmt is F64 or width == 64 else 0
        low, high = bounds(to)
        if v[1] == ff.INF:
            return low if v[0] else high
        sign, m, e = ff.integral(v, mode)
        return clamp(to, (-m if sign else m) << max(e, 0))

    return reference


def float_to_int_forms():
    for to, fmt, mode in itertools.product(INTS, (F16, BF16, F32, F64), ("rni", "rzi", "rmi", "rpi")):
        for ftz, sat in itertools.product((False, True) if fmt is F32 else (False,), (False, True)):
            if fmt is BF16 and (sat or to[1:] == "8"):
                continue
            flags = (".ftz" if ftz else "") + (".sat" if sat else "")
            exact = float_to_int(fmt, to, mode, ftz)
            d = REGISTER[int(to[1:])]
            f = lambda a, to=to, d=d, exact=exact: int_bits(to, exact(a), d)  # noqa: E731
            yield LaneForm(f"cvt.{mode}{flags}.{to}.{fmt.name}", d, REGISTER[fmt.bits], LETTER[fmt.name], f)


def int_to_float_forms():
    for source, fmt, mode in itertools.product(INTS, (F16, BF16, F32, F64), ("rn", "rz", "rm", "rp")):
        if fmt is BF16 and source[1:] == "8":
            continue
        f = lambda a, s=source, fmt=fmt, m=mode: fmt.pack(ff.from_int(int_value(s, a)), m)  # noqa: E731
        for register in kinds_of(source)[: 1 if fmt is BF16 else None]:
            yield LaneForm(f"cvt.{mode}.{fmt.name}.{source}", REGISTER[fmt.bits], register, register, f)


def float_form(to, source, mode, ftz=False, sat=False, relu=False, satfinite=False):
    flags = [name for name, on in (("ftz", ftz), ("sat", sat), ("satfinite", satfinite), ("relu", relu)) if on]
    opcode = ".".join(x for x in ("cvt", mode, *flags, to.name, source.name) if x)

    def reference(a):
        v = source.unpack(source.flush(a) if ftz and source is F32 else a)
        if mode.endswith("i"):
            v = ff.integral(v, mode)
        bits = to.pack(v, mode if mode in ("rn", "rz", "rm", "rp", "rna") else "rn")
        if ftz and to is F32:
            bits = to.flush(bits)
        if satfinite and bits & ~to.sign == to.infinity:
            bits = bits & to.sign | to.largest
        if sat:
            bits = to.saturate(bits)
        if relu:
            bits = to.relu(bits)
        return bits << 13 & 0xFFFFFFFF if to is TF32 and not to.is_nan(bits) else bits

    return opcode, reference


def single(*args, **flags):
    opcode, reference = float_form(*args, **flags)
    to, source = args[0], args[1]
    width = 32 if to is TF32 else to.bits
    same = nan_alike(to) if to is F64 else nan_alike(F32) if to is TF32 else None
    if to is TF32:
        inner = reference
        reference = lambda a: F32.nan if F32.is_nan(a) else inner(a)  # noqa: E731
    return LaneForm(opcode, REGISTER[width], REGISTER[source.bits], LETTER[source.name], reference, same=same)


def float_to_float_forms():
    ieee = ("rn", "rz", "rm", "rp")
    for fmt, mode, sat in itertools.product((F16, F32, F64), ("", "rni", "rzi", "rmi", "rpi"), (False, True)):
        for ftz in (False, True) if fmt is F32 else (False,):
            yield single(fmt, fmt, mode, ftz=ftz, sat=sat)
    for source, to in ((F16, F32), (F16, F64), (BF16, F32), (BF16, F64), (F32, F64)):
        for ftz, sat in itertools.product((False, True), (False, True)):
            if not (ftz and F32 not in (source, to)) and not (sat and source is BF16):
                yield single(to, source, "", ftz=ftz, sat=sat)
    for source, to in ((F64, F32), (F64, F16), (F64, BF16), (F32, F16), (F32, BF16)):
        for mode, ftz, sat in itertools.product(ieee, (False, True), (False, True)):
            if not (ftz and F32 not in (source, to)) and not (sat and to is BF16):
                yield single(to, source, mode, ftz=ftz, sat=sat)
    for mode in ("rn", "rz"):
        for to in (F16, BF16):
            for relu, satfinite in ((True, False), (False, True), (True, True)):
                yield single(to, F32, mode, relu=relu, satfinite=satfinite)
        for relu in (False, True):
            yield single(TF32, F32, mode, relu=relu)
    yield single(TF32, F32, "rna")
    for mode in ("", *ieee):
        yield single(BF16, F16, mode)
        yield single(F16, BF16, mode)


def pair_forms():
    for to in (F16, BF16):
        flags = [("rn", False, False), ("rn", True, False), ("rz", False, False), ("rz", True, False)]
        for mode, relu, satfinite in [*flags, ("rn", False, True), ("rn", True, True)]:
            opcode, one = float_form(to, F32, mode, relu=relu, satfinite=satfinite)
            opcode = opcode.replace(f".{to.name}.f32", f".{to.name}x2.f32")
            yield LaneForm(opcode, "w", "ww", "ff", lambda a, b, f=one: f(a) << 16 | f(b))


class Fp8(Format):
    """e4m3 has no infinity: all codes but one NaN per sign are numbers."""

    def __init__(self, name):
        super().__init__(name, *((4, 3) if name == "e4m3" else (5, 2)))
        self.code_nan = 0x7F
        self.top = 0x7E if name == "e4m3" else 0x7B

    def down(self, v):
        """Nearest even, saturating at the largest finite value; NaN is 0x7f."""
        if v is None:
            return self.code_nan
        if v[1] == ff.INF:
            return (0x80 if v[0] else 0) | self.top
        wide = Format("", self.exponent + 2, self.mantissa)  # the same places, room above
        magnitude = wide_code(wide, (0, *v[1:]), self)
        return (0x80 if v[0] else 0) | min(magnitude, self.top)

    def up(self, code):
        magnitude = code & 0x7F
        if magnitude == 0x7F or (self.name == "e5m2" and magnitude > 0x7C):
            return None
        if self.name == "e5m2" and magnitude == 0x7C:
            return (code >> 7, ff.INF)
        field, m = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        return (code >> 7, m | (1 << self.mantissa if field else 0), self.low + max(field, 1) - 1)


def wide_code(wide, v, narrow):
    """The code of a magnitude in `narrow`, which may lie beyond its last code: rounded on the grid of `narrow`."""
    _, m, e = v
    if m == 0:
        return 0
    last = max(e + m.bit_length() - 1 - narrow.mantissa, narrow.low)
    shift = last - e
    keep = m << -shift if shift <= 0 else m >> shift
    if shift > 0:
        rest, half = m & ((1 << shift) - 1), 1 << (shift - 1)
        keep += rest > half or (rest == half and keep & 1)
    return keep + (last - narrow.low << narrow.mantissa)


E4M3, E5M2 = Fp8("e4m3"), Fp8("e5m2")


def fp8_forms():
    for fmt in (E4M3, E5M2):
        name = f"{fmt.name}x2"
        for relu in (False, True):
            flag = ".relu" if relu else ""
            down = lambda v, f=fmt, r=relu: f.down((0, 0, 0) if r and v is not None and v[0] else v)  # noqa: E731

            def from_floats(a, b, d=down):
                return d(F32.unpack(a)) << 8 | d(F32.unpack(b))

            def from_halves(a, d=down):
                return d(F16.unpack(a >> 16)) << 8 | d(F16.unpack(a & 0xFFFF))

            def to_halves(a, f=fmt, r=relu):
                low, high = (F16.pack(f.up(a >> s & 255)) for s in (0, 8))
                low, high = (F16.relu(v) if r else v for v in (low, high))
                return high << 16 | low

            yield LaneForm(f"cvt.rn.satfinite{flag}.{name}.f32", "h", "ww", "ff", from_floats)
            yield LaneForm(f"cvt.rn.satfinite{flag}.{name}.f16x2", "h", "w", "E", from_halves)
            yield LaneForm(f"cvt.rn{flag}.f16x2.{name}", "w", "h", "h", to_halves)


def pack_forms():
    for to in ("s16", "u16"):
        f = lambda a, b, t=to: (clamp(t, int_value("s32", a)) & 0xFFFF) << 16 | clamp(t, int_value("s32", b)) & 0xFFFF  # noqa: E731
        yield LaneForm(f"cvt.pack.sat.{to}.s32", "w", "ww", "ww", f)
    for to in ("s8", "u8"):

        def reference(a, b, c, t=to):
            high, low = (clamp(t, int_value("s32", v)) & 0xFF for v in (a, b))
            return (c << 16 | high << 8 | low) & 0xFFFFFFFF

        yield LaneForm(f"cvt.pack.sat.{to}.s32.b32", "w", "www", "www", reference)


FAMILIES = ("int_to_int", "float_to_int", "int_to_float", "float_to_float", "pair", "fp8", "pack")


@pytest.mark.parametrize("family", FAMILIES)
def test_forms(family):
    run_lane_forms(list(globals()[f"{family}_forms"]()))
