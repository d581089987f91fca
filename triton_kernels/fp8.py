"""FP8 by integer arithmetic, one result on every device and every release: to nearest even, saturating, +-inf to the
largest value, NaN to 0x7F, -0.0 to 0x80."""

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
    """uint8 to float32, exactly."""
    byte = stored.to(tl.int32)
    if FORMAT == IS_E4M3:
        # As a float16 whose exponent is 8 too small: its subnormals come out right.
        half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where((byte & 0x7F) == 0x7F, float("nan"), value)
    else:
        value = (byte << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return value
