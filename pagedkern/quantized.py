"""Linear layers on the CPU over weights that a GGUF file holds in groups of 4 or 8 bits, without dequantising them.

`torch.ops.pagedkern_cpu.quantized_linears` (csrc/quantized_linear/params.h has the layout) takes a chain of them in one
call: RMSNorm, bias, SwiGLU and the residual are part of it. Inputs are rounded to 8 bits, one range for 32 of them;
products are exact integers, sums float32. bench/facts.md says what that costs in accuracy: less than bfloat16 does.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

import pagedkern

GROUP = 32  # weights that share a scale
PANEL = 16  # outputs that lie side by side
_NONE = torch.empty(0)
_ACCUMULATE, _GATED = 1, 2
_quantized_linears = torch.ops.pagedkern_cpu.quantized_linears.default


def is_fast() -> bool:
    """Whether this CPU has instructions that make such layers worth it: plain C++ is slow."""
    return pagedkern.build_info()["cpu_simd"] != "generic"


class QuantizedTensor(NamedTuple):
    """A [rows, columns] matrix as it is stored, each weight being value * scale + minimum.

    In 4 bits byte i of a group holds value i in its low and value 16 + i in its high half. In 8 bits a byte is a signed
    value, and there is no minimum.
    """

    values: torch.Tensor  # [rows, columns / 32, 16 or 32] uint8
    scale: torch.Tensor  # [rows, columns / 32] float16
    minimum: torch.Tensor | None = None  # the same; 4 bits only

    @property
    def shape(self) -> tuple[int, int]:
        return self.scale.size(0), self.scale.size(1) * GROUP


def concatenate(tensors: list[QuantizedTensor | None]) -> QuantizedTensor | None:
    """One matrix of all rows; None where one of them has another form."""
    if None in tensors or len({tensor.minimum is None for tensor in tensors}) > 1:
        return None
    return QuantizedTensor(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*tensors, strict=True)))


class QuantizedLinear:
    """y = norm(x) W^T + b (+ residual), called like `llama.Linear`."""

    def __init__(self, weight: QuantizedTensor, bias: torch.Tensor | None = None):
        self.out_features = weight.shape[0]
        self.bias = _NONE if bias is None else bias.float()
        self.weight = _panels(weight)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None, norm: torch.Tensor | None = None,
                 eps: float = 0.0) -> torch.Tensor:  # fmt: skip
        out = x.new_empty(x.size(0), self.out_features) if residual is None else residual.clone()
        Chain([step(self, 0, 1, norm, accumulate=residual is not None)], eps)([x, out])
        return out


def step(linear: QuantizedLinear, source: int, target: int, norm: torch.Tensor | None = None, accumulate: bool = False,
         gated: bool = False) -> tuple:  # fmt: skip
    """A linear of a chain: from which buffer to which, after an RMSNorm of a weight in float32, adding to what the
    target holds, gated as silu(first half) * second half. In the order of the op's arguments."""
    flags = _ACCUMULATE * accumulate + _GATED * gated
    return source, target, linear.weight, _NONE if norm is None else norm, linear.bias, flags


class Chain:
    def __init__(self, steps: list[tuple], eps: float):
        self._arguments = (*map(list, zip(*steps, strict=True)), eps)

    def __call__(self, buffers: list[torch.Tensor]) -> None:
        _quantized_linears(buffers, *self._arguments)


def _panels(weight: QuantizedTensor) -> torch.Tensor:
    """[panels, groups, bytes] uint8: 16 outputs side by side, scales first."""
    rows, groups = weight.scale.shape
    panels = -(-rows // PANEL)
    padding = (0, panels * PANEL - rows)
    values, *before = (F.pad(part, (0, 0) * (part.dim() - 1) + padding) for part in weight if part is not None)
    words = values.contiguous().view(torch.int32).view(panels, PANEL, groups, -1).permute(0, 2, 3, 1)
    numbers = values.view(torch.int8) if weight.minimum is None else (values & 15) + (values >> 4)
    before.append(numbers.sum(-1, dtype=torch.int16))
    head = torch.cat([x.view(torch.int16).view(panels, PANEL, groups).transpose(1, 2) for x in before], dim=-1)
    parts = (head.contiguous().view(torch.uint8), words.reshape(panels, groups, -1).view(torch.uint8))
    return torch.cat(parts, dim=-1)
