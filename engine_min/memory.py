"""`pagedkern-engine memory`: what a token of context costs, and how many sequences of which length fit."""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from engine_min.config import DTYPES
from engine_min.loader import open_checkpoint
from pagedkern.kv_layout import bytes_per_token, num_blocks_in

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="config.json, Hugging Face directory or .gguf file")
    parser.add_argument("--memory-gib", type=float, default=80 * 0.9, help="for weights and cache (0.9 of 80)")
    parser.add_argument("--kv-cache-dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--dynamic-scales", action="store_true", help="FP8 with a scale per token and head")
    parser.add_argument("--block-size", type=int, default=16)


class KVShape(NamedTuple):
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
    missing = [key for key in ("num_hidden_layers", "num_attention_heads") if key not in config]
    if missing:
        raise ValueError(f"the config lacks {', '.join(missing)}")
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // num_heads
    if not head_dim:
        raise ValueError("the config lacks head_dim and hidden_size")
    num_layers = config["num_hidden_layers"] // (config.get("full_attention_interval") or 1)
    if config.get("layer_types"):
        num_layers = sum("attention" in kind and "linear" not in kind for kind in config["layer_types"])
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    return KVShape(num_layers, num_kv_heads, head_dim, config.get("max_position_embeddings"))


def read_model(model: str) -> tuple[KVShape, int]:
    """The shape, and the bytes of the weights' files, where the model has any."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        config = open_checkpoint(model).config
        shape = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, config.max_position)
        return shape, path.stat().st_size
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{model!r} is neither a config.json nor a directory with one nor a .gguf file")
    return kv_shape(json.loads(path.read_text())), weights


def command(args: argparse.Namespace, load) -> None:
    """Prints the table; needs no engine."""
    dtype, block_size = args.kv_cache_dtype, args.block_size
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, expected at least 1")
    if not 0 < args.memory_gib < float("inf"):
        raise ValueError(f"memory_gib is {args.memory_gib}, expected a positive number")
    if args.dynamic_scales and not dtype.startswith("fp8"):
        raise ValueError(f"scales belong to FP8 caches, the cache is {dtype}")
    shape, weights = read_model(args.model)
    per_token = shape.bytes_per_token(dtype, args.dynamic_scales)
    room = int(args.memory_gib * 2**30) - weights
    num_blocks = num_blocks_in(room, block_size, per_token)
    if num_blocks < 1:
        raise ValueError(f"{args.memory_gib:g} GiB less {_size(weights)} of weights leave no room for a block")
    scales = ", a scale per token and head" if args.dynamic_scales else ""
    lines = [
        f"{shape.num_layers} attention layers, {shape.num_kv_heads} KV heads of {shape.head_dim}, {dtype}{scales}",
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
    print("\n".join(lines))


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} B"
