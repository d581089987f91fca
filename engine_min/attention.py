"""The one place where the model meets the ops: rotate, write to the cache, attend."""

from dataclasses import dataclass

import torch

from engine_min.config import Backend, EngineConfig, ModelConfig
from engine_min.kv_cache import KVCache


@dataclass
class Batch:
    """One step's batch: num_tokens rows of num_seqs sequences, each with the keys it already has."""

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64
    block_table: torch.Tensor  # [num_seqs, max_blocks] int32
    seq_lens: torch.Tensor  # [num_seqs] int32, this step's tokens included
    cu_seqlens_q: torch.Tensor | None  # [num_seqs + 1] int32; None: one token for each sequence
    max_seqlen_q: int
    max_seqlen_k: int


class Attention:
    """Called once per layer with the fused qkv rows; `begin` sets the batch for all layers of a step.

    Every tensor that a step reads is fixed: the caches, the scales, the buffers behind the batch, the output and the
    workspace. So what is recorded once can be replayed.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, backend: Backend, kv_cache: KVCache,
                 cos_sin_cache: torch.Tensor):  # fmt: skip
        ops, device, num_tokens = backend.ops, backend.device, config.max_num_batched_tokens
        self._rope_and_write = ops.rope_reshape_and_cache.default
        self._write_dynamic = ops.reshape_and_cache_dynamic.default
        self._attend = ops.paged_attention.default
        self._cache = kv_cache
        self._cos_sin_cache = cos_sin_cache.to(device)
        self._head_dim = model.head_dim
        self._heads = [model.num_heads, model.num_kv_heads, model.num_kv_heads]
        self._out = torch.empty(num_tokens, model.num_heads, model.head_dim, dtype=backend.dtype, device=device)
        self._no_slots = torch.full((num_tokens,), -1, device=device) if kv_cache.dynamic else None
        # Of its own, since what a recorded step reads must stay where it is.
        heads = (model.num_heads, model.num_kv_heads, model.head_dim)
        size = max(
            ops.paged_attention_workspace_size(rows, *heads, config.max_num_seqs, longest, config.max_model_len)
            for rows, longest in ((config.max_num_seqs, 1), (num_tokens, num_tokens))
        )
        workspace = torch.zeros(size, dtype=torch.uint8, device=device) if size else None
        # (scale, causal, window_left, window_right, softcap, alibi_slopes, sinks, k_scale, v_scale, lse, num_splits,
        # workspace)
        self._options = [
            (model.head_dim**-0.5, True, (window or 0) - 1, -1, 0.0, None, None, *scales, None, 0, workspace)
            for window, scales in zip(model.sliding_windows, kv_cache.scales, strict=True)
        ]

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._batch_out = self._out[: batch.positions.size(0)]
        self._batch_rows = self._batch_out.flatten(1)

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        batch, caches, scales = self._batch, self._cache.layers[layer], self._cache.scales[layer]
        query, key, value = qkv.view(qkv.size(0), -1, self._head_dim).split_with_sizes(self._heads, dim=1)
        rotated = (query, key, value, *caches, batch.positions, self._cos_sin_cache)
        if self._cache.dynamic:  # a negative slot rotates and writes nothing
            self._rope_and_write(*rotated, self._no_slots[: query.size(0)])
            self._write_dynamic(key, value, *caches, *scales, batch.slot_mapping)
        else:
            self._rope_and_write(*rotated, batch.slot_mapping, False, *scales)
        self._attend(
            self._batch_out, query, *caches, batch.block_table, batch.seq_lens, batch.cu_seqlens_q,
            batch.max_seqlen_q, batch.max_seqlen_k, *self._options[layer],
        )  # fmt: skip
        return self._batch_rows
