"""`pagedkern-engine memory`: what a token of context costs, and how many sequences of which length fit."""

import argparse
import json
from pathlib import Path

from engine_min.checkpoint import open_checkpoint, reading
from engine_min.config import DTYPES
from pagedkern.kv_layout import bytes_per_token, num_blocks_in

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="config.json, Hugging Face directory or .gguf file")
    parser.add_argument("--memory-gib", type=float, default=80 * 0.9, help="for weights and cache (0.9 of 80)")
    parser.add_argument("--kv-cache-dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--dynamic-scales", action="store_true", help="FP8 with a scale per token and head")
    parser.add_argument("--block-size", type=int, default=16)


def kv_shape(config: dict) -> tuple[int, int, int, int]:
    """(layers, KV heads, head_dim, longest context) from config.json of any model with grouped-query attention, also
    where it is a part of a larger one. Layers without attention (linear, recurrent) keep no keys."""
    config = config.get("text_config", config)
    num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    num_layers //= config.get("full_attention_interval") or 1
    if config.get("layer_types"):
        num_layers = sum("attention" in kind and "linear" not in kind for kind in config["layer_types"])
    num_kv_heads = config.get("num_key_value_heads", num_heads)
    longest = config.get("max_position_embeddings") or LENGTHS[-1]
    if min(num_layers, num_kv_heads, head_dim, longest) < 1:
        raise ValueError(
            f"{num_layers} attention layers, {num_kv_heads} KV heads of {head_dim} and {longest} positions, expected "
            "at least 1 of each"
        )
    return num_layers, num_kv_heads, head_dim, longest


def read_model(model: str) -> tuple[tuple[int, int, int, int], int]:
    """The same of a model, and the bytes of its weights' files, where it has any."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        config = open_checkpoint(model).config
        shape = (config.num_layers, config.num_kv_heads, config.head_dim, config.max_position)
        return shape, path.stat().st_size
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{model!r} is neither a config.json nor a directory with one nor a .gguf file")
    with reading(model):
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
    (num_layers, num_heads, head_dim, longest), weights = read_model(args.model)
    per_token = bytes_per_token(num_heads, head_dim, DTYPES[dtype], num_layers, args.dynamic_scales)
    num_blocks = num_blocks_in(int(args.memory_gib * 2**30) - weights, block_size, per_token)
    if num_blocks < 1:
        raise ValueError(f"{args.memory_gib:g} GiB less {_mib(weights)} of weights leave no room for a block")
    print(f"{num_layers} attention layers, {num_heads} KV heads of {head_dim}, {dtype}")
    rows = {"bytes per token": per_token, "bytes per block": per_token * block_size, "bytes of weights": weights}
    rows |= {"blocks": num_blocks, "tokens": num_blocks * block_size}
    for name, count in rows.items():
        print(f"{name:20} {count:>18,}")
    print(f"\n{'tokens of a sequence':>20} {'KV cache of one':>18} {'sequences that fit':>20}")
    for length in [*(length for length in LENGTHS if length < longest), longest]:
        print(f"{length:>20,} {_mib(length * per_token):>18} {num_blocks // -(-length // block_size):>20,}")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB"
