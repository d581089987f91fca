"""The one place where the engine meets the ops: attention over the paged KV cache, and the cache itself."""

import os
import re
from dataclasses import dataclass

import torch

from engine_min.block_manager import Pairs
from engine_min.checkpoint import Checkpoint
from engine_min.config import Backend, EngineConfig, ModelConfig
from engine_min.parallel import TensorParallel
from pagedkern.kv_layout import bytes_per_token

# Of a checkpoint's tensor that is a scale of the KV cache, and none of the model's weights.
SCALE_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:[kv]_proj\.)?([kv])_scale")

Scales = list[tuple[torch.Tensor, torch.Tensor]]  # (k_scale, v_scale) of each layer, as the ops take them


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

    def __init__(self, config: EngineConfig, model: ModelConfig, backend: Backend, kv_cache: "KVCache",
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


class KVCache:
    """One allocation, a pair of `[num_blocks, block_size, num_kv_heads, head_dim]` views per layer: layout N2 of
    pagedkern.kv_layout, where keys and values of a block lie together. Left uninitialised: what no query may see cannot
    change a result, and pages that are never touched cost no memory.

    An FP8 cache has the static scales that are asked for, or one per token and head, found as tokens are written and
    kept beside them. It moves blocks for the block manager, their scales too.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, backend: Backend, parallel: TensorParallel):
        model, device, dtype = parallel.local(checkpoint.config), backend.device, backend.cache_dtype
        self.scales = static_scales(config, checkpoint, parallel, device) if dtype.itemsize == 1 else []
        self.dynamic = dtype.itemsize == 1 and not self.scales
        per_token = bytes_per_token(model.num_kv_heads, model.head_dim, dtype, model.num_layers, self.dynamic)
        num_blocks = config.num_blocks or default_num_blocks(config, model, config.block_size * per_token, device)
        self.num_blocks = parallel.least(num_blocks)
        self.num_host_blocks = int(config.swap_space_gib * 2**30) // (config.block_size * per_token)
        shape = (model.num_layers, self.num_blocks, 2, config.block_size, model.num_kv_heads, model.head_dim)
        self.storage = torch.empty(shape, dtype=dtype, device=device)
        self._pools = [self.storage]
        self.layers = [part.unbind(1) for part in self.storage]
        if self.dynamic:
            self._pools.append(torch.empty(*shape[:-1], 1, dtype=torch.float32, device=device))
            self.scales = [part.squeeze(-1).unbind(1) for part in self._pools[1]]
        self.scales = self.scales or [(None, None)] * model.num_layers
        is_pinned = device.type == "cuda"
        self._host = [
            torch.empty((len(pool), self.num_host_blocks, *pool.shape[2:]), dtype=pool.dtype, pin_memory=is_pinned)
            for pool in self._pools
        ]
        self._copy_blocks = backend.ops.copy_blocks.default
        self._swap_blocks = backend.ops.swap_blocks.default

    def copy(self, pairs: Pairs) -> None:
        mapping = torch.tensor(pairs)
        for pool in self._pools:
            self._copy_blocks(list(pool[:, :, 0]), list(pool[:, :, 1]), mapping)

    def swap_out(self, pairs: Pairs) -> None:
        self._swap(self._pools, self._host, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        self._swap(self._host, self._pools, pairs)

    def _swap(self, sources: list[torch.Tensor], targets: list[torch.Tensor], pairs: Pairs) -> None:
        """On the current stream, as all else is: later writers of these blocks wait their turn."""
        mapping = torch.tensor(pairs)
        for source_pool, target_pool in zip(sources, targets, strict=True):
            for source, target in zip(source_pool, target_pool, strict=True):
                self._swap_blocks(source, target, mapping)


def static_scales(config: EngineConfig, checkpoint: Checkpoint, parallel: TensorParallel,
                  device: torch.device) -> Scales:  # fmt: skip
    """What kv_scales asks for, of this process's heads; none where they are dynamic."""
    shape, given = (checkpoint.config.num_layers, checkpoint.config.num_kv_heads), config.kv_scales
    if given == "dynamic":
        return []
    sides = _checkpoint_scales(checkpoint, *shape) if given == "auto" else _given_scales(given, shape)
    for side, scales in zip("kv", sides, strict=False):
        usable = (scales.isfinite() & (scales > 0)).all(dim=1).tolist()
        if not all(usable):
            raise ValueError(
                f"layer {usable.index(False)}'s {side}_scale holds a scale that is not finite and positive"
            )
    return list(zip(*(parallel.part(scales, 1).to(device).contiguous() for scales in sides), strict=True))


def _given_scales(given, shape: tuple[int, int]) -> list[torch.Tensor]:
    """[num_layers, num_kv_heads] for keys and for values."""
    pair = given if isinstance(given, tuple | list) else (given, given)
    if len(pair) != 2:
        raise ValueError(f"kv_scales has {len(pair)} entries, expected one for keys and one for values")
    sides = [torch.as_tensor(side, dtype=torch.float32) for side in pair]
    for side in sides:
        if side.shape not in ((), shape, (shape[0], 1), shape[1:]):
            raise ValueError(f"kv_scales is {list(side.shape)}, expected a number, {list(shape[1:])} or {list(shape)}")
    return [side.expand(shape) for side in sides]


def _checkpoint_scales(checkpoint: Checkpoint, num_layers: int, num_heads: int) -> list[torch.Tensor]:
    """The same from the checkpoint's tensors, if it has any."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for name in filter(SCALE_NAME.fullmatch, checkpoint.names):
        layer, side = SCALE_NAME.fullmatch(name).groups()
        scale = checkpoint.tensor(name).float().flatten()
        if scale.numel() not in (1, num_heads):
            raise ValueError(f"{name} has {scale.numel()} elements, expected 1 or {num_heads} (KV heads)")
        found[int(layer), side] = scale.expand(num_heads)
    missing = [f"{side}_scale of layer {i}" for i in range(num_layers) for side in "kv" if (i, side) not in found]
    if found and missing:
        raise ValueError(f"the checkpoint has KV cache scales, but lacks {', '.join(missing)}")
    return [torch.stack([found[i, side] for i in range(num_layers)]) for side in "kv"] if found else []


def default_num_blocks(config: EngineConfig, model: ModelConfig, block_bytes: int, device: torch.device) -> int:
    """What the batch could ever use, if the memory is there: on a GPU the share of it that is ours, less what weights,
    logits and activations take; on the CPU a quarter of what is free now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        activations = config.max_num_batched_tokens * (8 * model.hidden_size + 3 * model.intermediate_size) * 4
        logits = config.max_num_seqs * model.vocab_size * 12
        room = int(total * config.gpu_memory_utilization) - (total - free) - activations - logits
        if room < block_bytes:
            raise ValueError(
                f"no room for a KV cache: {free >> 20} of {total >> 20} MiB are free with the weights loaded, and "
                f"gpu_memory_utilization is {config.gpu_memory_utilization}"
            )
    else:
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    wanted = config.max_num_seqs * -(-config.max_model_len // config.block_size)
    return max(1, min(wanted, room // block_bytes))
