"""Building blocks of the models: linear layers with packed weights, norms and activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

INT4_GROUP = 32  # weights that share a scale
INT4_ROW_MULTIPLE = 64  # weight rows that the kernel takes at a time
INT4_MAX_ROWS = 4  # the 4-bit kernel and the bfloat16 one are equally fast at about 8


class Linear:
    """y = x W^T + b (+ residual).

    On the CPU the weight is packed once into oneDNN's own layout: 1.4 times (bf16, one row) to 2 times (float32, 16
    rows) as fast as `F.linear`, which works from the plain layout each time (bench/facts.md has the ladder). The
    residual is added in the accumulator, before the one rounding to the output's dtype.

    A few rows take as long as reading the weights does, so in bfloat16 a weight that is stored in 4 bits is kept so,
    too, for up to INT4_MAX_ROWS rows: a third of the time. Scales and zero points are rounded to bfloat16 there, which
    moves the weights by 0.20 % in the root mean square; rounding each of them to bfloat16 moves them by 0.13 %.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None,
                 int4: tuple[torch.Tensor, torch.Tensor] | None = None):  # fmt: skip
        self.bias = bias
        usable = int4 is not None and weight.dtype == torch.bfloat16 and weight.size(0) % INT4_ROW_MULTIPLE == 0
        self.int4 = _pack_int4(*int4) if usable else None
        self.packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.packed &= weight.dtype != torch.float16 or torch.ops.mkldnn._is_mkldnn_fp16_supported()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if not self.packed:
            y = F.linear(x, self.weight, self.bias)
            return y if residual is None else y.add_(residual)
        if self.int4 is not None and x.size(0) <= INT4_MAX_ROWS:
            y = _int4_linear(x, self.int4[0], INT4_GROUP, self.int4[1])
            if self.bias is not None:
                y.add_(self.bias)
            return y if residual is None else y.add_(residual)
        if residual is None:
            return _linear(x, self.weight, self.bias, "none", [], "")
        return _linear_binary(x, residual, self.weight, self.bias, "add")


_linear = torch.ops.mkldnn._linear_pointwise.default
_linear_binary = torch.ops.mkldnn._linear_pointwise.binary
_int4_linear = torch.ops.aten._weight_int4pack_mm_for_cpu.default


def _pack_int4(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """To the layout of torch's 4-bit kernel, which takes (scale, weight of the value 8) per group, groups outermost."""
    scale, minimum = scales.unbind(-1)
    pairs = torch.stack((scale, minimum + 8 * scale), dim=-1).transpose(0, 1).contiguous().bfloat16()
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 1), pairs


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside.

    `F.rms_norm` runs nine small kernels. For a single row in bfloat16, where the scale is one number, two do it in half
    the time and with one rounding; float32 keeps to the sums that transformers makes.
    """
    size = weight.size(0)
    if x.size(0) == 1 and x.dtype == torch.bfloat16 and eps > 0 and x.device.type == "cpu":
        norm = torch.linalg.vector_norm(x, dtype=torch.float32).item()
        return torch.addcmul(_ZERO, x, weight, value=(norm * norm / size + eps) ** -0.5)
    return F.rms_norm(x, (size,), weight, eps)


_ZERO = torch.zeros(1, dtype=torch.bfloat16)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
