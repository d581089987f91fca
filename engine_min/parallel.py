"""Tensor parallelism: each of several processes holds a part of every layer's heads and of its MLP.

Queries, keys, values, gate and up are cut by their outputs, the two linears after them by their inputs, so that one sum
over the processes ends each half of a layer. Embedding and head are whole: every process has all logits, draws the same
tokens and takes the same steps, and none has to be told what the others decided.
"""

from copy import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine_min.config import ModelConfig


@dataclass(frozen=True)
class TensorParallel:
    rank: int = 0
    size: int = 1

    def local(self, config: ModelConfig) -> ModelConfig:
        """The config of this process's part. KV heads that are fewer than the processes are kept by several of them."""
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if heads % self.size or (kv_heads % self.size and self.size % kv_heads) or config.intermediate_size % self.size:
            raise ValueError(
                f"{heads} query heads, {kv_heads} key/value heads and {config.intermediate_size} MLP rows cannot be "
                f"shared by {self.size} processes (tensor_parallel_size)"
            )
        local = copy(config)
        local.num_heads, local.num_kv_heads = heads // self.size, max(1, kv_heads // self.size)
        return local

    def part(self, tensor: torch.Tensor, dim: int, unit: int = 1) -> torch.Tensor:
        """This process's share of a dimension that consists of units (heads, or rows) of such a size; those that are
        fewer than the processes are kept by several of them."""
        units = tensor.size(dim) // unit
        return tensor.narrow(dim, self.rank * units // self.size * unit, max(1, units // self.size) * unit)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(partial)
        return partial

    def least(self, value: int) -> int:
        """The smallest of the processes' values: what all of them can do."""
        if self.size == 1:
            return value
        least = torch.tensor(value, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


def joined(size: int) -> TensorParallel:
    """This process's place among those that torch.distributed has joined."""
    if size == 1:
        return TensorParallel()
    if not dist.is_initialized() or dist.get_world_size() != size:
        raise ValueError(
            f"tensor_parallel_size is {size}, expected so many processes joined by torch.distributed "
            "(engine_min.launch starts them)"
        )
    return TensorParallel(dist.get_rank(), size)
