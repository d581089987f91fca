"""`pagedkern-engine memory`: what a token of context costs, and how many sequences of which length fit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from engine_min.config import DTYPES
from engine_min.loader import open_checkpoint
from pagedkern.kv_layout import bytes_per_token, num_blocks_in

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True)
class KVShape:
    """What the size of a cache depends on. Layers without attention (linear, recurrent) keep no keys."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position: int | None

    def bytes_per_token(self, dtype: str, dynamic_scales: bool = False) -> int:
        return bytes_per_token(self.num_kv_heads, self.head_dim, DTYPES[dtype], self.num_layers, dynamic_scales)


def kv_shape(config: dict) -> KVShape:
    """From config.json of any model with grouped-query attention, also where it is a part of a larger one."""
    config = config.get("text_config", config)
    needed = ("num_hidden_layers", "num_attention_heads")
    missing = [key for key in needed if key not in config]
    if missing:
        raise ValueError(f"the config lacks {', '.join(missing)}")
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // num_heads
    if not head_dim:
        raise ValueError("the config lacks head_dim and hidden_size")
    return KVShape(
        num_layers=_attention_layers(config),
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        max_position=config.get("max_position_embeddings"),
    )


def _attention_layers(config: dict) -> int:
    kinds = config.get("layer_types")
    if kinds:
        return sum("attention" in kind and "linear" not in kind for kind in kinds)
    return config["num_hidden_layers"] // (config.get("full_attention_interval") or 1)


def read_shape(model: str) -> KVShape:
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        config = open_checkpoint(model).config
        return KVShape(config.num_layers, config.num_kv_heads, config.head_dim, config.max_position)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{model!r} is neither a config.json nor a directory with one nor a .gguf file")
    return kv_shape(json.loads(path.read_text()))


def weight_bytes(model: str) -> int:
    """The size of the weights' files, where the model has any."""
    path = Path(model).expanduser()
    if path.is_dir():
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return path.stat().st_size if path.suffix == ".gguf" else 0


def report(model: str, dtype: str, block_size: int, memory_gib: float, dynamic_scales: bool) -> str:
    """The table; `memory_gib` is what weights and cache share."""
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, expected at least 1")
    if dynamic_scales and not dtype.startswith("fp8"):
        raise ValueError(f"scales belong to FP8 caches, the cache is {dtype}")
    shape, weights = read_shape(model), weight_bytes(model)
    per_token = shape.bytes_per_token(dtype, dynamic_scales)
    room = int(memory_gib * 2**30) - weights
    if room < per_token * block_size:
        raise ValueError(f"{memory_gib:g} GiB less {_size(weights)} of weights leave no room for a block")
    num_blocks = num_blocks_in(room, block_size, per_token)
    lines = [
        f"{shape.num_layers} attention layers, {shape.num_kv_heads} KV heads of {shape.head_dim}, {dtype}"
        + (", a scale per token and head" if dynamic_scales else ""),
        f"{'bytes per token':24} {per_token:>16,}   ({_size(per_token)})",
        f"{'bytes per block':24} {per_token * block_size:>16,}   ({block_size} tokens)",
        f"{'weights':24} {weights:>16,}   ({_size(weights)})",
        f"{'blocks':24} {num_blocks:>16,}   (in {_size(room)})",
        f"{'tokens':24} {num_blocks * block_size:>16,}",
        "",
        f"{'tokens of a sequence':>20} {'KV cache of one':>18} {'sequences that fit':>20}",
    ]
    longest = shape.max_position or LENGTHS[-1]
    for length in [*(length for length in LENGTHS if length < longest), longest]:
        lines.append(f"{length:>20,} {_size(length * per_token):>18} {num_blocks // -(-length // block_size):>20,}")
    return "\n".join(lines)


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} B"
