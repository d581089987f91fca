"""FP8. Encoding is integer arithmetic, one result on every device and every release: to nearest even, saturating,
+-inf to the largest value, NaN to 0x7F, -0.0 to 0x80. Decoding gives float16, exactly, whichever way is taken."""

import torch
import triton
import triton.language as tl

# How a cache stores its elements: the constexpr FORMAT of the kernels.
PLAIN, E4M3, E5M2 = 0, 1, 2
_FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}

IS_PLAIN = tl.constexpr(PLAIN)
IS_E4M3 = tl.constexpr(E4M3)


def format_of(cache: torch.Tensor) -> int:
    return _FORMATS.get(cache.dtype, PLAIN)


@triton.jit
def encode(x, FORMAT: tl.constexpr):
    """float32 to the byte, as uint8."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    if FORMAT == IS_E4M3:
        LARGEST: tl.constexpr = 0x43E00000  # 448
        SMALLEST_NORMAL: tl.constexpr = 0x3C800000  # 2^-6
        DROPPED: tl.constexpr = 20  # bits of a float32 mantissa that are rounded away
        REBIAS: tl.constexpr = 120 << 3
        STEP: tl.constexpr = 16384.0  # its unit in the last place is the step of the subnormals, 2^-9
        STEP_BITS: tl.constexpr = 0x46800000
    else:
        LARGEST: tl.constexpr = 0x47600000  # 57344
        SMALLEST_NORMAL: tl.constexpr = 0x38800000  # 2^-14
        DROPPED: tl.constexpr = 21
        REBIAS: tl.constexpr = 112 << 2
        STEP: tl.constexpr = 128.0  # 2^-16
        STEP_BITS: tl.constexpr = 0x43000000
    magnitude = tl.minimum(magnitude, LARGEST)
    rounded = magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    normal = (rounded >> DROPPED) - REBIAS
    subnormal = (magnitude.to(tl.float32, bitcast=True) + STEP).to(tl.int32, bitcast=True) - STEP_BITS
    byte = tl.where(magnitude >= SMALLEST_NORMAL, normal, subnormal) | ((bits >> 24) & 0x80)
    return tl.where(is_nan, 0x7F, byte).to(tl.uint8)


@triton.jit
def decode(stored, FORMAT: tl.constexpr):
    """uint8 to float16, exactly."""
    byte = stored.to(tl.int16)
    if FORMAT == IS_E4M3:
        # As a float16 whose exponent is 8 too small: its subnormals come out right.
        value = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where((byte & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    else:
        return (byte << 8).to(tl.float16, bitcast=True)


@triton.jit
def decode_pairs(pairs, FORMAT: tl.constexpr, ODD: tl.constexpr):
    """Of int16 that hold two elements each the first one, or the second if ODD, as float16. By PTX of sm_89, two pairs
    an instruction."""
    # The bytes of a register: first and second of one pair, first and second of the other.
    if FORMAT == IS_E4M3:
        HALF: tl.constexpr = "second" if ODD else "first"
        return tl.inline_asm_elementwise(
            "{ .reg .b32 sorted; .reg .b16 first, second; prmt.b32 sorted, $1, 0, 0x3120;"
            " mov.b32 {first, second}, sorted; cvt.rn.f16x2.e4m3x2 $0, " + HALF + "; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        PLACES: tl.constexpr = "0x3414" if ODD else "0x2404"
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, " + PLACES + ";", "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def widen(stored, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Stored elements as 16-bit floats, exactly: as they are, or float16."""
    if FORMAT == IS_PLAIN:
        return stored
    elif NATIVE:
        return stored.to(tl.float8e4nv if FORMAT == IS_E4M3 else tl.float8e5, bitcast=True).to(tl.float16)
    else:
        return decode(stored, FORMAT)


@triton.jit
def into_half_range(b_query):
    """(query rows in the range of float16, what to multiply their scores with), float32. A bfloat16 row is brought by
    a power of two to where its greatest element is below 2^15: elements above 2^-29 of that one stay exact."""
    wide = b_query.to(tl.float32)
    if b_query.dtype == tl.float16:
        return wide, tl.full((b_query.shape[0],), 1.0, tl.float32)
    else:
        exponent = (tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23) & 0xFF
        shift = tl.where(exponent == 255, 0, tl.minimum(141 - exponent, 126))
        up = ((127 + shift) << 23).to(tl.float32, bitcast=True)
        return wide * up[:, None], ((127 - shift) << 23).to(tl.float32, bitcast=True)
