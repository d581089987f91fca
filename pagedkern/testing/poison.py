"""Memory that shows stray accesses: NaN wherever nothing may be read, a sentinel wherever nothing may be written."""

from dataclasses import dataclass

import torch

GUARD_ELEMENTS = 64
SENTINEL_BYTE = 0xA5
HUGE_BLOCK = 2147480000
BAD_BLOCKS = (-1, 1 << 30, HUGE_BLOCK)


@dataclass
class Buffer:
    """A strided view inside a larger flat allocation."""

    base: torch.Tensor  # [elements], all that was allocated
    view: torch.Tensor  # the tensor handed to the op

    def bytes(self) -> torch.Tensor:
        return self.base.view(torch.uint8)

    def owned_bytes(self) -> torch.Tensor:
        """bool, shaped like bytes(): what belongs to the view."""
        owned = torch.zeros(self.base.numel(), dtype=torch.bool, device=self.base.device)
        owned.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(True)
        return owned.repeat_interleave(self.base.element_size())

    def clone(self) -> "Buffer":
        base = self.bytes().clone().view(self.base.dtype)
        return Buffer(base, restride(base, self.view.shape, self.view.stride(), self.view.storage_offset()))


def restride(base: torch.Tensor, shape, strides, offset: int) -> torch.Tensor:
    """as_strided that works for FP8 in every release."""
    if base.element_size() == 1 and base.dtype != torch.uint8:
        return base.view(torch.uint8).as_strided(shape, strides, offset).view(base.dtype)
    return base.as_strided(shape, strides, offset)


def allocate(shape, strides, offset: int, dtype: torch.dtype, fill: str, device="cpu") -> Buffer:
    """A buffer with guards on both sides. fill: "nan" (every byte 0xFF: NaN in all formats), "sentinel" or "zero"."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    elements = GUARD_ELEMENTS + offset + extent + GUARD_ELEMENTS
    byte = {"nan": 0xFF, "sentinel": SENTINEL_BYTE, "zero": 0}[fill]
    base = torch.full((elements * dtype.itemsize,), byte, dtype=torch.uint8, device=device).view(dtype)
    return Buffer(base, restride(base, shape, strides, GUARD_ELEMENTS + offset))


def poison_block_table(table: torch.Tensor, keep: list[range], bad_ids: list[int]) -> None:
    """Puts ids that must not be used everywhere but in the columns `keep` of each row."""
    for row, columns in enumerate(keep):
        for column in range(table.size(1)):
            if column not in columns:
                table[row, column] = bad_ids[(row + column) % len(bad_ids)]
