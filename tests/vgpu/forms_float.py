"""Binary floating point in integers: values are exact, every rounding is written out. The judge of the executor's own.

A value is None (NaN), (sign, INF) or (sign, m, e): (-1)**sign * m * 2**e.
"""

import math

INF = "inf"


class Format:
    """One IEEE-like format: `exponent` and `mantissa` are the widths of its fields."""

    def __init__(self, name, exponent, mantissa):
        self.name, self.exponent, self.mantissa = name, exponent, mantissa
        self.bits = 1 + exponent + mantissa
        self.sign = 1 << (self.bits - 1)
        self.infinity = ((1 << exponent) - 1) << mantissa
        self.nan = self.sign - 1
        self.largest = self.infinity - 1
        self.smallest_normal = 1 << mantissa
        self.low = 2 - (1 << (exponent - 1)) - mantissa  # exponent of the last place of subnormals
        self.one = ((1 << (exponent - 1)) - 1) << mantissa

    def unpack(self, bits):
        """The value of a bit pattern."""
        sign, field, m = bits >> (self.bits - 1), bits >> self.mantissa & ((1 << self.exponent) - 1), 0
        m = bits & ((1 << self.mantissa) - 1)
        if field == (1 << self.exponent) - 1:
            return None if m else (sign, INF)
        if field == 0:
            return (sign, m, self.low)
        return (sign, m | 1 << self.mantissa, self.low + field - 1)

    def pack(self, value, mode="rn", sticky=False):
        """The bits of a value, rounded: rn, rz, rm, rp or rna. `sticky`: a little more magnitude than (m, e) says."""
        if value is None:
            return self.nan
        sign = value[0]
        top = self.sign if sign else 0
        if value[1] == INF:
            return top | self.infinity
        _, m, e = value
        if m == 0:
            return top
        if sticky:  # room below the last place for the part that is not in m
            m, e = (m << 4) | 1, e - 4
        last = max(e + m.bit_length() - 1 - self.mantissa, self.low)
        shift = last - e
        if shift <= 0:
            keep, up = m << -shift, False
        else:
            keep, rest, half = m >> shift, m & ((1 << shift) - 1), 1 << (shift - 1)
            up = {
                "rn": rest > half or (rest == half and keep & 1),
                "rna": rest >= half,
                "rz": False,
                "rm": bool(rest and sign),
                "rp": bool(rest and not sign),
            }[mode]
        keep += bool(up)
        if keep >> (self.mantissa + 1):
            keep, last = keep >> 1, last + 1
        if keep >> self.mantissa == 0:
            return top | keep
        field = last - self.low + 1
        if field >= (1 << self.exponent) - 1:
            to_infinity = mode in ("rn", "rna") or (mode == "rm" and sign) or (mode == "rp" and not sign)
            return top | (self.infinity if to_infinity else self.largest)
        return top | field << self.mantissa | (keep & ((1 << self.mantissa) - 1))

    def is_nan(self, bits):
        return bits & (self.sign - 1) > self.infinity

    def flush(self, bits):
        """Subnormals become zero of their sign."""
        return bits & self.sign if bits & self.infinity == 0 else bits

    def saturate(self, bits):
        """To [+0, 1]; NaN becomes +0."""
        if self.is_nan(bits) or bits & self.sign:
            return 0
        return min(bits, self.one)

    def relu(self, bits):
        return self.nan if self.is_nan(bits) else 0 if bits & self.sign else bits

    def key(self, bits):
        """Orders numbers like their values, -0 below +0."""
        return -(bits & ~self.sign) - 1 if bits & self.sign else bits


F16, BF16 = Format("f16", 5, 10), Format("bf16", 8, 7)
F32, F64 = Format("f32", 8, 23), Format("f64", 11, 52)
TF32 = Format("tf32", 8, 10)
FORMATS = {f.name: f for f in (F16, BF16, F32, F64)}


def negative(v):
    return None if v is None else (1 - v[0], *v[1:])


def add(a, b, mode="rn"):
    """The exact sum; the mode decides the sign of an exact zero."""
    if a is None or b is None:
        return None
    if a[1] == INF or b[1] == INF:
        if a[1] == b[1] == INF and a[0] != b[0]:
            return None
        return a if a[1] == INF else b
    e = min(a[2], b[2])
    total = (-1) ** a[0] * (a[1] << (a[2] - e)) + (-1) ** b[0] * (b[1] << (b[2] - e))
    if total == 0:
        sign = a[0] if a[0] == b[0] and a[1] == b[1] == 0 else int(mode == "rm")
        return (sign, 0, e)
    return (int(total < 0), abs(total), e)


def multiply(a, b):
    if a is None or b is None:
        return None
    sign = a[0] ^ b[0]
    if INF in (a[1], b[1]):
        return None if 0 in (a[1], b[1]) else (sign, INF)
    return (sign, a[1] * b[1], a[2] + b[2])


def fused(a, b, c, mode="rn"):
    return add(multiply(a, b), c, mode)


def divide(a, b):
    """(value, sticky)."""
    if a is None or b is None:
        return None, False
    sign = a[0] ^ b[0]
    if a[1] == INF or b[1] == INF:
        return (None if a[1] == b[1] else (sign, INF) if a[1] == INF else (sign, 0, 0)), False
    if b[1] == 0:
        return (None if a[1] == 0 else (sign, INF)), False
    if a[1] == 0:
        return (sign, 0, 0), False
    quotient, rest = divmod(a[1] << 180, b[1])
    return (sign, quotient, a[2] - b[2] - 180), rest != 0


def square_root(a):
    """(value, sticky)."""
    if a is None or (a[0] and a[1] != 0):
        return None, False
    if a[1] == INF or a[1] == 0:
        return a, False
    m, e = a[1] << 200, a[2] - 200
    if e & 1:
        m, e = m << 1, e - 1
    root = math.isqrt(m)
    return (0, root, e // 2), root * root != m


def integral(v, mode):
    """Rounded to an integer: rni, rzi, rmi, rpi. Zero keeps the sign."""
    if v is None or v[1] == INF or v[2] >= 0:
        return v
    sign, m, e = v
    keep, rest, half = m >> -e, m & ((1 << -e) - 1), 1 << (-e - 1)
    up = {
        "rni": rest > half or (rest == half and keep & 1),
        "rzi": False,
        "rmi": rest and sign,
        "rpi": rest and not sign,
    }[mode]
    return (sign, keep + bool(up), 0)


def from_int(n):
    return (int(n < 0), abs(n), 0)


def to_float(fmt, bits):
    """A Python float, exact."""
    v = fmt.unpack(bits)
    if v is None:
        return math.nan
    if v[1] == INF:
        return -math.inf if v[0] else math.inf
    return math.ldexp(-float(v[1]) if v[0] else float(v[1]), v[2])


def from_float(fmt, x):
    """Bits of a Python float, rounded to nearest."""
    if math.isnan(x):
        return fmt.nan
    if math.isinf(x):
        return fmt.infinity | (fmt.sign if x < 0 else 0)
    sign = int(math.copysign(1, x) < 0)
    m, e = math.frexp(abs(x))
    return fmt.pack((sign, int(m * 2**53), e - 53))


def compare(name, a, b):
    """PTX's comparison of two values."""
    unordered = a is None or b is None
    if name == "num":
        return not unordered
    if name == "nan":
        return unordered
    if unordered:
        return name in ("equ", "neu", "ltu", "leu", "gtu", "geu")
    x, y = (math.inf * (-1) ** v[0] if v[1] == INF else v for v in (a, b))
    if isinstance(x, tuple) and isinstance(y, tuple):
        e = min(x[2], y[2])
        x, y = ((-1) ** v[0] * (v[1] << (v[2] - e)) for v in (x, y))
    else:  # only the sign and the infinity matter
        x, y = (((-1) ** v[0] if v[1] else 0) if isinstance(v, tuple) else v for v in (x, y))
    return {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}[name.rstrip("u")]
