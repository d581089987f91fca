"""Cache tensors in the layouts engines use. The ops only see strides, so each layout is a way to allocate.

    key_cache, value_cache = allocate("HND", num_blocks, block_size, num_kv_heads, head_dim, torch.bfloat16)

| layout | memory, outermost first |
|---|---|
| `NHD` | K: block, token, head, dim; V the same, in a tensor of its own |
| `HND` | K: block, head, token, dim; V the same, in a tensor of its own |
| `N2` | block, K or V, token, head, dim: both in one tensor, so that a block moves in one transfer |
| `N2_HND` | block, K or V, head, token, dim |
| `packed` | block, token, head, K's dim then V's: K and V of a token and head side by side |
"""

import torch
from torch import Tensor

# Axes of the allocation, outermost first: N block, S token in the block, H head, C which of K and V, D head_dim.
_AXES = {"NHD": "CNSHD", "HND": "CNHSD", "N2": "NCSHD", "N2_HND": "NCHSD", "packed": "NSHCD"}
LAYOUTS = tuple(_AXES)


def allocate(
    layout: str,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """A zeroed key_cache and value_cache of one layer, each `[num_blocks, block_size, num_kv_heads, head_dim]`."""
    axes = _axes(layout)
    sizes = {"C": 2, "N": num_blocks, "S": block_size, "H": num_kv_heads, "D": head_dim}
    if axes[0] == "C":
        return tuple(_view(_zeros(axes[1:], sizes, dtype, device), axes[1:]) for _ in range(2))
    memory = _zeros(axes, sizes, dtype, device)
    which = axes.index("C")
    rest = axes.replace("C", "")
    return _view(memory.select(which, 0), rest), _view(memory.select(which, 1), rest)


def layout_of(key_cache: Tensor, value_cache: Tensor) -> str | None:
    """The name of the layout of two caches as `allocate` makes them; None where it is another set of strides."""
    for layout, axes in _AXES.items():
        sizes = {"C": 2, **dict(zip("NSHD", key_cache.shape, strict=True))}
        order = axes[1:] if axes[0] == "C" else axes
        strides, step = {}, 1
        for axis in reversed(order):
            strides[axis] = step
            step *= sizes[axis]
        expected = tuple(strides[axis] for axis in "NSHD")
        apart = (value_cache.data_ptr() - key_cache.data_ptr()) // key_cache.element_size()
        if key_cache.stride() == value_cache.stride() == expected and ("C" not in order or apart == strides["C"]):
            return layout
    return None


def bytes_per_token(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, num_layers: int = 1, scales: bool = False
) -> int:
    """Bytes of keys and values of one token over all layers; `scales`: with a float32 scale per head and side."""
    return 2 * num_layers * num_kv_heads * (head_dim * dtype.itemsize + (4 if scales else 0))


def num_blocks_in(num_bytes: int, block_size: int, bytes_per_token: int) -> int:
    """Whole blocks that fit in a number of bytes."""
    return num_bytes // (block_size * bytes_per_token)


def allocate_scales(
    num_blocks: int, block_size: int, num_kv_heads: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """k_scale and v_scale per token and head, as `reshape_and_cache_dynamic` writes them: float32 ones."""
    shape = (num_blocks, block_size, num_kv_heads)
    return torch.ones(shape, device=device), torch.ones(shape, device=device)


def _axes(layout):
    if layout not in _AXES:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return _AXES[layout]


def _zeros(axes, sizes, dtype, device):
    # torch.zeros has no FP8 fill on every device; zero bytes are zero in every dtype here.
    shape = [sizes[axis] for axis in axes]
    return torch.zeros([*shape[:-1], shape[-1] * dtype.itemsize], dtype=torch.uint8, device=device).view(dtype)


def _view(memory, axes):
    return memory.permute([axes.index(axis) for axis in "NSHD"])
