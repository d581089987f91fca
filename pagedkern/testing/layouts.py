"""Every memory layout of the op contract as strides. A layout is a function of the sizes to (strides, offset, ...)."""

from dataclasses import dataclass

import torch

from pagedkern.testing.poison import GUARD_ELEMENTS, Buffer, allocate, restride

# Rows are [tokens, heads, head_dim]: layout(tokens, heads, head_dim) -> (token stride, head stride, offset).
ROW_LAYOUTS = {
    "contiguous": lambda n, h, d: (h * d, d, 0),
    "fused": lambda n, h, d: ((h + 5) * d, d, 2 * d),
    "head_major": lambda n, h, d: (d, max(n, 1) * d, 0),
    "every_second_token": lambda n, h, d: (2 * h * d, d, 0),
    "every_second_head": lambda n, h, d: (2 * h * d, 2 * d, 0),
    "odd_offset": lambda n, h, d: (h * d, d, 1),
    "odd_stride": lambda n, h, d: (h * (d + 1) + 2, d + 1, 3),
    "wide": lambda n, h, d: (h * d + 1000, d, 8),
}
# Rows may share memory only where they are read.
INPUT_ONLY_LAYOUTS = {
    "broadcast_token": lambda n, h, d: (0, d, 0),
    "broadcast_head": lambda n, h, d: (d, 0, 0),
    "broadcast_all": lambda n, h, d: (0, 0, 0),
}


def rows(layout: str, shape: tuple[int, int, int], dtype: torch.dtype, fill: str, device="cpu") -> Buffer:
    """[tokens, heads, head_dim] in the named layout, everything filled."""
    token_stride, head_stride, offset = (ROW_LAYOUTS | INPUT_ONLY_LAYOUTS)[layout](*shape)
    return allocate(shape, (token_stride, head_stride, 1), offset, dtype, fill, device)


def row_heads(layout: str, shape: tuple[int, int], dtype: torch.dtype, fill: str, device="cpu") -> Buffer:
    """[tokens, heads] without a contiguous last dim: lse."""
    tokens, heads = shape
    strides, offset = {
        "contiguous": ((heads, 1), 0),
        "head_major": ((1, max(tokens, 1)), 0),
        "odd_stride": ((3 * heads + 1, 3), 1),
    }[layout]
    return allocate(shape, strides, offset, dtype, fill, device)


@dataclass(frozen=True)
class CacheStrides:
    key: tuple[int, int, int]  # block, token, head
    value: tuple[int, int, int]
    value_offset: int | None  # elements into the shared allocation; None: an allocation of its own
    offset: int = 0


# layout(num_blocks, block_size, heads, head_dim)
CACHE_LAYOUTS = {
    "NHD": lambda n, b, h, d: CacheStrides((b * h * d, h * d, d), (b * h * d, h * d, d), None),
    "HND": lambda n, b, h, d: CacheStrides((h * b * d, d, b * d), (h * b * d, d, b * d), None),
    "N2_NHD": lambda n, b, h, d: CacheStrides((2 * b * h * d, h * d, d), (2 * b * h * d, h * d, d), b * h * d),
    "N2_HND": lambda n, b, h, d: CacheStrides((2 * b * h * d, d, b * d), (2 * b * h * d, d, b * d), b * h * d),
    "2N_NHD": lambda n, b, h, d: CacheStrides((b * h * d, h * d, d), (b * h * d, h * d, d), n * b * h * d),
    "packed": lambda n, b, h, d: CacheStrides((2 * b * h * d, 2 * h * d, 2 * d), (2 * b * h * d, 2 * h * d, 2 * d), d),
    "mixed": lambda n, b, h, d: CacheStrides((b * h * d, h * d, d), (h * b * d, d, b * d), None),
    "token_major": lambda n, b, h, d: CacheStrides((h * d, n * h * d, d), (d, h * n * d, n * d), None),
    "odd": lambda n, b, h, d: CacheStrides(
        (b * (h * (d + 1) + 2) + 1, h * (d + 1) + 2, d + 1), (b * (h * (d + 3) + 4), h * (d + 3) + 4, d + 3), None, 1
    ),
    "odd_offset": lambda n, b, h, d: CacheStrides((b * h * d, h * d, d), (b * h * d, h * d, d), None, 1),
}


@dataclass
class CachePair:
    """key_cache and value_cache; buffers holds the one or two allocations behind them."""

    buffers: list[Buffer]
    key: torch.Tensor
    value: torch.Tensor

    def clone(self) -> "CachePair":
        buffers = [buffer.clone() for buffer in self.buffers]

        def same_view(old: torch.Tensor, buffer: Buffer) -> torch.Tensor:
            return restride(buffer.base, old.shape, old.stride(), old.storage_offset())

        return CachePair(buffers, same_view(self.key, buffers[0]), same_view(self.value, buffers[-1]))


def cache_pair(layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype, fill: str, device="cpu") -> CachePair:
    """key_cache and value_cache [num_blocks, block_size, num_kv_heads, head_dim] in the named layout."""
    strides = CACHE_LAYOUTS[layout](*shape)
    if strides.value_offset is None:
        key = allocate(shape, (*strides.key, 1), strides.offset, dtype, fill, device)
        value = allocate(shape, (*strides.value, 1), strides.offset, dtype, fill, device)
        return CachePair([key, value], key.view, value.view)
    num_blocks, block_size, heads, head_dim = shape
    both = allocate((2 * num_blocks * block_size * heads * head_dim,), (1,), 0, dtype, fill, device)
    key = restride(both.base, shape, (*strides.key, 1), GUARD_ELEMENTS)
    value = restride(both.base, shape, (*strides.value, 1), GUARD_ELEMENTS + strides.value_offset)
    return CachePair([both], key, value)
