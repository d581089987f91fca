"""The one place where the model meets the ops: rotate, write to the cache, attend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_min.config import ModelConfig
from engine_min.kv_cache import KVCache

# Every backend registers the same schemas under a namespace of its own.
NAMESPACES = {"cpu": "pagedkern"}


@dataclass
class BatchMetadata:
    """One step's batch: num_tokens rows of num_seqs sequences, each with the keys it already has."""

    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64
    block_table: torch.Tensor  # [num_seqs, max_blocks] int32
    seq_lens: torch.Tensor  # [num_seqs] int32, this step's tokens included
    cu_seqlens_q: torch.Tensor  # [num_seqs + 1] int32
    max_seqlen_q: int
    max_seqlen_k: int


class Attention:
    """Called once per layer with the fused qkv rows; `begin` sets the batch for all layers of a step."""

    def __init__(self, backend: str, config: ModelConfig, kv_cache: KVCache, cos_sin_cache: torch.Tensor,
                 max_num_tokens: int, dtype: torch.dtype):  # fmt: skip
        import pagedkern  # noqa: F401 - loads the op library

        ops = getattr(torch.ops, NAMESPACES[backend])
        self._rope_and_write = ops.rope_reshape_and_cache.default
        self._attend = ops.paged_attention.default
        self._layers = kv_cache.layers
        self._cos_sin_cache = cos_sin_cache
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        device = kv_cache.storage.device
        self._out = torch.empty(max_num_tokens, config.num_heads, config.head_dim, dtype=dtype, device=device)

    def begin(self, batch: BatchMetadata) -> None:
        self._batch = batch
        self._batch_out = self._out[: batch.positions.size(0)]
        self._batch_rows = self._batch_out.flatten(1)

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        query, key, value = qkv.view(qkv.size(0), -1, self._head_dim).split_with_sizes(self._heads, dim=1)
        key_cache, value_cache = self._layers[layer]
        self._rope_and_write(
            query, key, value, key_cache, value_cache, batch.positions, self._cos_sin_cache, batch.slot_mapping
        )
        self._attend(
            self._batch_out, query, key_cache, value_cache, batch.block_table, batch.seq_lens, batch.cu_seqlens_q,
            batch.max_seqlen_q, batch.max_seqlen_k, self._scale,
        )  # fmt: skip
        return self._batch_rows
