"""Building blocks of the models: linear layers with packed weights, norms and activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """y = x W^T + b (+ residual).

    On the CPU the weight is packed once into oneDNN's own layout: 1.4 times (bf16, one row) to 2 times (float32, 16
    rows) as fast as `F.linear`, which works from the plain layout each time (bench/facts.md has the ladder). The
    residual is added in the accumulator, before the one rounding to the output's dtype.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.bias = bias
        self.packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.packed &= weight.dtype != torch.float16 or torch.ops.mkldnn._is_mkldnn_fp16_supported()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if not self.packed:
            y = F.linear(x, self.weight, self.bias)
            return y if residual is None else y.add_(residual)
        if residual is None:
            return _linear(x, self.weight, self.bias, "none", [], "")
        return _linear_binary(x, residual, self.weight, self.bias, "add")


_linear = torch.ops.mkldnn._linear_pointwise.default
_linear_binary = torch.ops.mkldnn._linear_pointwise.binary


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
