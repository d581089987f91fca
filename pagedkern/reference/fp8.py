"""FP8 by the definition of the two formats, independent of torch's casts (their saturation changed over releases)."""

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
NAN_BYTE = 0x7F


def fp8_max(dtype: torch.dtype) -> float:
    """The largest finite value: 448 or 57344."""
    return float(_magnitudes(dtype)[-1])


def _decode_byte(byte: int, dtype: torch.dtype) -> float:
    mantissa_bits, bias = (3, 7) if dtype == torch.float8_e4m3fn else (2, 15)
    sign = -1.0 if byte & 0x80 else 1.0
    exponent = (byte & 0x7F) >> mantissa_bits
    mantissa = byte & ((1 << mantissa_bits) - 1)
    if dtype == torch.float8_e4m3fn and byte & 0x7F == 0x7F:
        return float("nan")
    if dtype == torch.float8_e5m2 and exponent == 31:
        return sign * float("inf") if mantissa == 0 else float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1.0 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def decode_table(dtype: torch.dtype) -> torch.Tensor:
    """float64 [256]: the value of every byte."""
    return torch.tensor([_decode_byte(byte, dtype) for byte in range(256)], dtype=torch.float64)


_TABLES = {dtype: decode_table(dtype) for dtype in FP8_DTYPES}


def _magnitudes(dtype: torch.dtype) -> torch.Tensor:
    """The finite values of the bytes 0, 1, 2, ... in rising order: the index is the byte."""
    positive = _TABLES[dtype][:128]
    return positive[positive.isfinite()]


def decode(stored: torch.Tensor) -> torch.Tensor:
    """float64 values of an FP8 tensor of any strides."""
    return _TABLES[stored.dtype].to(stored.device)[stored.view(torch.uint8).long()]


def encode(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Nearest value, ties to the even byte, saturating; +-inf gives +-max, every NaN gives 0x7F, -0.0 gives 0x80."""
    magnitudes = _magnitudes(dtype).to(values.device)
    wanted = values.double().abs().nan_to_num(nan=0.0).clamp(max=magnitudes[-1].item())
    upper = torch.searchsorted(magnitudes, wanted.contiguous())
    lower = (upper - 1).clamp(min=0)
    above, below = magnitudes[upper] - wanted, wanted - magnitudes[lower]
    take_lower = (below < above) | ((below == above) & (lower % 2 == 0))
    byte = torch.where(take_lower, lower, upper)
    byte = torch.where(values.signbit(), byte + 0x80, byte)
    byte = torch.where(values.isnan(), NAN_BYTE, byte)
    return byte.to(torch.uint8).view(dtype)
