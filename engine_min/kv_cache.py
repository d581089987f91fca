"""The paged KV cache: one allocation, a pair of `[num_blocks, block_size, num_kv_heads, head_dim]` views per layer."""

from __future__ import annotations

import os

import torch

from engine_min.config import ModelConfig
from pagedkern.kv_layout import bytes_per_token


class KVCache:
    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        # Layout N2 of pagedkern.kv_layout: keys and values of a block lie together. Left uninitialised: what no query
        # may see cannot change a result, and pages that are never touched cost no memory.
        shape = (config.num_layers, num_blocks, 2, block_size, config.num_kv_heads, config.head_dim)
        self.storage = torch.empty(shape, dtype=dtype, device=device)
        self.layers = [(self.storage[i, :, 0], self.storage[i, :, 1]) for i in range(config.num_layers)]
        self.num_blocks = num_blocks
        self.block_size = block_size


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    return block_size * bytes_per_token(config.num_kv_heads, config.head_dim, dtype, config.num_layers)


def default_num_blocks(block_bytes: int, max_blocks_wanted: int) -> int:
    """A quarter of the memory that is free now, and never more than the batch could ever use."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(max_blocks_wanted, free // 4 // block_bytes))
