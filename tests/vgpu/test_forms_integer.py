"""Every integer, bit and logic form against Python integers."""

import pytest
from forms_kernel import LaneForm, run_lane_forms

WIDTH = {16: "h", 32: "w", 64: "x"}


def signed(v, bits):
    return v - (1 << bits) if v >> (bits - 1) & 1 else v


def value(v, bits, is_signed):
    v &= (1 << bits) - 1
    return signed(v, bits) if is_signed else v


def toward_zero(a, b):
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def divide(a, b):
    return -1 if b == 0 else toward_zero(a, b)  # no result is defined for 0; the executor gives all ones


def remainder(a, b):
    return a if b == 0 else a - b * toward_zero(a, b)


def on_ints(function, bits, is_signed, to_bits=None, wide_from=None):
    """Bits in, bits out, through integers; sources from number `wide_from` on have the width of the result."""
    to_bits = to_bits or bits

    def reference(*sources):
        ints = [
            value(v, to_bits if wide_from is not None and k >= wide_from else bits, is_signed)
            for k, v in enumerate(sources)
        ]
        return function(*ints) & ((1 << to_bits) - 1)

    return reference


def integer_forms():
    for kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
        bits, is_signed = int(kind[1:]), kind[0] == "s"
        w = WIDTH[bits]
        two = {
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "mul.lo": lambda a, b: a * b,
            "mul.hi": lambda a, b, n=bits: a * b >> n,
            "div": divide,
            "rem": remainder,
            "min": min,
            "max": max,
        }
        for name, function in two.items():
            yield LaneForm(f"{name}.{kind}", w, w + w, w + w, on_ints(function, bits, is_signed))
        three = {
            "mad.lo": lambda a, b, c: a * b + c,
            "mad.hi": lambda a, b, c, n=bits: (a * b >> n) + c,
            "sad": lambda a, b, c: c + abs(a - b),
        }
        for name, function in three.items():
            yield LaneForm(f"{name}.{kind}", w, w * 3, w * 3, on_ints(function, bits, is_signed))
        if is_signed:
            yield LaneForm(f"abs.{kind}", w, w, w, on_ints(abs, bits, True))
            yield LaneForm(f"neg.{kind}", w, w, w, on_ints(lambda a: -a, bits, True))
        if bits < 64:
            d = WIDTH[2 * bits]
            yield LaneForm(f"mul.wide.{kind}", d, w + w, w + w, on_ints(lambda a, b: a * b, bits, is_signed, 2 * bits))
            wide = on_ints(lambda a, b, c: a * b + c, bits, is_signed, 2 * bits, wide_from=2)
            yield LaneForm(f"mad.wide.{kind}", d, w + w + d, w + w + d, wide)


def carry_forms():
    """One sequence per form: sets the carry from a predicate, runs the form, reads the carry back."""
    for kind in ("u32", "s32", "u64", "s64"):
        bits, is_signed = int(kind[1:]), kind[0] == "s"
        w = WIDTH[bits]
        keep = (1 << bits) - 1

        def low_high(a, b, high, n=bits, s=is_signed):
            product = value(a, n, s) * value(b, n, s)
            return (product >> n if high else product) & ((1 << n) - 1)

        forms = {}
        for name, uses in (("add", False), ("addc", True)):
            forms[name] = (2, uses, lambda a, b, c: a + b + c)
        for name, uses in (("sub", False), ("subc", True)):
            forms[name] = (2, uses, lambda a, b, c: a - b - c)
        for part, high in (("lo", False), ("hi", True)):
            for name, uses in (("mad", False), ("madc", True)):
                forms[f"{name}.{part}"] = (3, uses, lambda a, b, c, i, h=high, f=low_high: f(a, b, h) + c + i)
        for name, (count, uses, function) in forms.items():
            for sets in (False, True):
                if not uses and not sets:
                    continue

                def reference(*sources, f=function, u=uses, s=sets, n=bits, k=keep):
                    total = f(*sources[:-1], sources[-1] if u else 0)
                    carry = (total >> n & 1) if s else sources[-1]
                    return total & k, carry

                opcode = f"{name}{'.cc' if sets else ''}.{kind}"
                text = ", ".join(["{d0}", *(f"{{s{k}}}" for k in range(count))])
                # the carry flag from a predicate before, the carry flag as a number after
                around = "{{{{ .reg .b32 c, x; selp.u32 c, 1, 0, {{s{0}}}; add.cc.u32 x, c, 0xffffffff; OP; "
                around = around.format(count) + "addc.u32 {d1}, 0, 0; }}"
                yield LaneForm(opcode, w + "w", w * count + "p", w * count + "p", reference, text, around=around)


def packed(function, is_signed):
    def reference(a, b):
        low, high = (function(*(value(v >> s, 16, is_signed) for v in (a, b))) & 0xFFFF for s in (0, 16))
        return low | high << 16

    return reference


def clamp(v):
    return max(-(1 << 31), min((1 << 31) - 1, v))


def dots(a, b, c, signs, count, shift):
    width = 32 // count if count == 4 else 16
    total = c
    for k in range(count):
        x = value(a >> width * k, width, signs[0] == "s")
        y = value(b >> (8 * k + shift), 8, signs[1] == "s")
        total += x * y
    return total & 0xFFFFFFFF


def special_forms():
    yield LaneForm("add.sat.s32", "w", "ww", "ww", on_ints(lambda a, b: clamp(a + b), 32, True))
    yield LaneForm("sub.sat.s32", "w", "ww", "ww", on_ints(lambda a, b: clamp(a - b), 32, True))
    yield LaneForm("mad.hi.sat.s32", "w", "www", "www", on_ints(lambda a, b, c: clamp((a * b >> 32) + c), 32, True))
    for kind in ("s32", "u32"):
        s = kind[0] == "s"

        def low24(v, s=s):
            return value(v, 24, s)

        def product(shift, low24=low24):
            return lambda a, b: (low24(a) * low24(b) >> shift) & 0xFFFFFFFF

        for part, shift in (("lo", 0), ("hi", 16)):
            f = product(shift)
            yield LaneForm(f"mul24.{part}.{kind}", "w", "ww", "ww", f)
            yield LaneForm(f"mad24.{part}.{kind}", "w", "www", "www", lambda a, b, c, f=f: (f(a, b) + c) & 0xFFFFFFFF)
    for kind, s in (("s16x2", True), ("u16x2", False)):
        for name, f in (("add", lambda a, b: a + b), ("min", min), ("max", max)):
            yield LaneForm(f"{name}.{kind}", "w", "ww", "ww", packed(f, s))
    for name, f in (("min", min), ("max", max)):
        relu = on_ints(lambda a, b, f=f: max(0, f(a, b)), 32, True)
        yield LaneForm(f"{name}.relu.s32", "w", "ww", "ww", relu)
    for a in "su":
        for b in "su":
            for name, count, shift in (("dp4a", 4, 0), ("dp2a.lo", 2, 0), ("dp2a.hi", 2, 16)):
                f = lambda x, y, z, t=(a, b), n=count, s=shift: dots(x, y, z, t, n, s)  # noqa: E731
                yield LaneForm(f"{name}.{a}32.{b}32", "w", "www", "www", f)


def shift_forms():
    for bits, w in WIDTH.items():
        keep = (1 << bits) - 1
        left = lambda a, n, k=keep, b=bits: a << n & k if n < b else 0  # noqa: E731
        right = lambda a, n, b=bits: a >> n if n < b else 0  # noqa: E731
        arithmetic = lambda a, n, k=keep, b=bits: signed(a, b) >> min(n, b) & k  # noqa: E731
        for name, f in (("shl.b", left), ("shr.b", right), ("shr.u", right), ("shr.s", arithmetic)):
            yield LaneForm(f"{name}{bits}", w, w + "w", w + "n", f)
    for mode in ("wrap", "clamp"):

        def amount(n, m=mode):
            return n & 31 if m == "wrap" else min(n, 32)

        # d, a (low), b (high), c
        f_left = lambda a, b, c, n=amount: (((b << 32 | a) << n(c)) >> 32) & 0xFFFFFFFF  # noqa: E731
        f_right = lambda a, b, c, n=amount: ((b << 32 | a) >> n(c)) & 0xFFFFFFFF  # noqa: E731
        yield LaneForm(f"shf.l.{mode}.b32", "w", "www", "wwn", f_left)
        yield LaneForm(f"shf.r.{mode}.b32", "w", "www", "wwn", f_right)


def bit_field_extract(a, pos, length, bits, is_signed):
    """As the ISA's pseudo code has it."""
    pos, length, msb = pos & 0xFF, length & 0xFF, bits - 1
    if not is_signed or length == 0:
        fill = 0
    else:
        fill = a >> min(pos + length - 1, msb) & 1
    d = 0
    for i in range(bits):
        bit = a >> (pos + i) & 1 if i < length and pos + i <= msb else fill
        d |= bit << i
    return d


def bit_field_insert(a, b, c, d, bits):
    pos, length = c & 0xFF, d & 0xFF
    for i in range(length):
        if pos + i > bits - 1:
            break
        b = b & ~(1 << (pos + i)) | (a >> i & 1) << (pos + i)
    return b


def find_top(a, bits, is_signed, shift):
    if is_signed and a >> (bits - 1):
        a ^= (1 << bits) - 1
    if a == 0:
        return 0xFFFFFFFF
    return bits - a.bit_length() if shift else a.bit_length() - 1


def find_nth(mask, base, offset):
    offset = signed(offset, 32)
    if offset == 0:
        return base if base < 32 and mask >> base & 1 else 0xFFFFFFFF
    pos, count, step = base, abs(offset) - 1, 1 if offset > 0 else -1
    while 0 <= pos < 32:
        if mask >> pos & 1:
            if count == 0:
                return pos
            count -= 1
        pos += step
    return 0xFFFFFFFF


def bit_mask(a, b, clamp_mode):
    ones = 0xFFFFFFFF
    mask0 = ones << (a & 31) & ones
    total = (a & 31) + (b & 31)
    overflow = total >= 32
    if clamp_mode and a >= 32:
        mask0, overflow = 0, True
    if clamp_mode and b >= 32:
        overflow = True
    mask1 = 0 if overflow else ones << total & ones
    return mask0 & ~mask1 & ones


def sign_zero_extend(a, b, clamp_mode, is_signed):
    ones, low = 0xFFFFFFFF, b & 31
    too_large = clamp_mode and b >= 32
    mask = 0 if too_large else ones << low & ones
    negative = is_signed and low and not too_large and a >> (low - 1) & 1
    return a & ~mask | (mask if negative else 0)


def permute(a, b, selector):
    pool = [(b << 32 | a) >> 8 * k & 255 for k in range(8)]
    d = 0
    for k in range(4):
        s = selector >> 4 * k & 15
        byte = pool[s & 7]
        if s & 8:
            byte = 255 if byte & 128 else 0
        d |= byte << 8 * k
    return d


PERMUTE_MODES = {  # bytes 3, 2, 1, 0 of the result by the low two bits of the selector
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


def truth_table(a, b, c, lut):
    return sum((lut >> ((a >> k & 1) << 2 | (b >> k & 1) << 1 | c >> k & 1) & 1) << k for k in range(32))


def logic_forms():
    for bits, w in WIDTH.items():
        keep = (1 << bits) - 1
        for name, f in (("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b)):
            yield LaneForm(f"{name}.b{bits}", w, w + w, w + w, f)
        yield LaneForm(f"not.b{bits}", w, w, w, lambda a, k=keep: ~a & k)
        yield LaneForm(f"cnot.b{bits}", w, w, w, lambda a: int(a == 0))
    for name, f in (("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b)):
        yield LaneForm(f"{name}.pred", "p", "pp", "pp", f)
    yield LaneForm("not.pred", "p", "p", "p", lambda a: 1 - a)
    for kind in ("u32", "s32", "u64", "s64"):
        bits, s = int(kind[1:]), kind[0] == "s"
        w = WIDTH[bits]
        extract = lambda a, p, n, b=bits, s=s: bit_field_extract(a, p, n, b, s)  # noqa: E731
        yield LaneForm(f"bfe.{kind}", w, w + "ww", w + "nn", extract)
        for shift in (False, True):
            f = lambda a, b=bits, s=s, t=shift: find_top(a, b, s, t)  # noqa: E731
            yield LaneForm(f"bfind{'.shiftamt' if shift else ''}.{kind}", "w", w, w, f)
    for bits in (32, 64):
        w = WIDTH[bits]
        insert = lambda a, b, c, d, n=bits: bit_field_insert(a, b, c, d, n)  # noqa: E731
        yield LaneForm(f"bfi.b{bits}", w, w + w + "ww", w + w + "nn", insert)
        yield LaneForm(f"popc.b{bits}", "w", w, w, lambda a: bin(a).count("1"))
        yield LaneForm(f"clz.b{bits}", "w", w, w, lambda a, n=bits: n - a.bit_length())
        yield LaneForm(f"brev.b{bits}", w, w, w, lambda a, n=bits: int(f"{a:0{n}b}"[::-1], 2))
    yield LaneForm("fns.b32", "w", "www", "wnw", find_nth)
    yield LaneForm("fns.b32", "w", "www", "wnn", find_nth)
    for mode in ("clamp", "wrap"):
        yield LaneForm(f"bmsk.{mode}.b32", "w", "ww", "nn", lambda a, b, c=mode == "clamp": bit_mask(a, b, c))
        for kind in ("u32", "s32"):
            f = lambda a, b, c=mode == "clamp", s=kind == "s32": sign_zero_extend(a, b, c, s)  # noqa: E731
            yield LaneForm(f"szext.{mode}.{kind}", "w", "ww", "wn", f)
    yield LaneForm("prmt.b32", "w", "www", "www", permute)
    for mode, table in PERMUTE_MODES.items():
        f = lambda a, b, c, t=table: permute(a, b, int(t[c & 3], 16))  # noqa: E731
        yield LaneForm(f"prmt.b32.{mode}", "w", "www", "wwn", f)


def lop3_forms():
    for lut in (0x00, 0x80, 0x96, 0xE8, 0xCA, 0xF8, 0x3C, 0xFF, 0x01, 0x1B):
        text = f"{{d0}}, {{s0}}, {{s1}}, {{s2}}, {lut:#x}"
        yield LaneForm("lop3.b32", "w", "www", "www", lambda a, b, c, t=lut: truth_table(a, b, c, t), text)
        for op, join in (("or", lambda x, q: x | q), ("and", lambda x, q: x & q)):
            for bang in ("", "!"):

                def reference(a, b, c, q, t=lut, j=join, n=bang):
                    d = truth_table(a, b, c, t)
                    return d, j(int(d != 0), 1 - q if n else q)

                text = f"{{d0}}|{{d1}}, {{s0}}, {{s1}}, {{s2}}, {lut:#x}, {bang}{{s3}}"
                yield LaneForm(f"lop3.{op}.b32", "wp", "wwwp", "wwwp", reference, text)


@pytest.mark.parametrize("seed", (0, 1))
@pytest.mark.parametrize("family", ("integer", "carry", "special", "shift", "logic", "lop3"))
def test_forms(family, seed):
    run_lane_forms(list(globals()[f"{family}_forms"]()), seed)
