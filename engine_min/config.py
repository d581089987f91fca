"""What the engine is asked for (EngineConfig), what runs it here (Backend) and what the model is (ModelConfig)."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

import pagedkern
from engine_min.request import check_fields, number, one_of, refuse
from engine_min.rope import Rope
from pagedkern.quantized import is_fast as quantized_is_fast

DTYPES = {  # of caches
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class EngineConfig:
    """The arguments of `LLM`, checked once so that nothing behind it has to check again."""

    model: str
    device: str = one_of("auto", "cpu", "cuda")
    dtype: str = one_of("auto", "bfloat16", "float16", "float32")  # auto is what this machine is fast at
    kv_cache_dtype: str = one_of("auto", *DTYPES)  # auto is the model's dtype
    # Scales of an FP8 cache: "auto" (the checkpoint's where it has them, else dynamic), "dynamic" (per token and head),
    # or given: a number, a tensor [num_kv_heads] or [num_layers, num_kv_heads], or a pair (keys', values') of these.
    kv_scales: object = "auto"
    attention: str = one_of("auto", "cpu", "cuda", "triton", "vgpu", "reference")
    block_size: int = number(16, 1)
    num_blocks: int | None = number(None, 1)  # None: from the memory at hand
    gpu_memory_utilization: float = number(0.9, 0, 1)  # the share of a GPU's memory that the engine may fill
    max_model_len: int | None = number(None, 1)  # None: the model's own limit
    max_num_seqs: int = number(256, 1)
    max_num_batched_tokens: int = number(2048, 1)
    tensor_parallel_size: int = number(1, 1)  # processes that share the model, each with a part of every layer
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    enforce_eager: bool = False  # no recorded decode steps
    swap_space_gib: float = number(0, 0)  # host memory for preempted sequences; without it they are recomputed
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        is_named = isinstance(self.kv_scales, str)
        if is_named and self.kv_scales not in ("auto", "dynamic"):
            refuse(self, "kv_scales", "auto, dynamic, or scales")
        if not is_named and not self.kv_cache_dtype.startswith("fp8"):
            raise ValueError(f"kv_scales need an FP8 cache, kv_cache_dtype is {self.kv_cache_dtype!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            refuse(
                self, "max_num_batched_tokens", f"at least max_num_seqs ({self.max_num_seqs}): every running sequence "
                "decodes one token per step",
            )  # fmt: skip


@dataclass(frozen=True)
class Backend:
    """Who runs the ops, and on what: every backend has the same ones, in a namespace of its own."""

    name: str
    device: torch.device
    ops: object  # torch.ops.<namespace>
    dtype: torch.dtype
    cache_dtype: torch.dtype


def resolve_backend(config: EngineConfig, is_quantized: bool) -> Backend:
    """What is asked for, or the best that is here."""
    has_gpu = torch.cuda.is_available()
    name, device, dtype = config.attention, config.device, config.dtype
    if name == "auto":
        name = "cpu" if device == "cpu" or not has_gpu else ("cuda" if pagedkern.build_info()["cuda"] else "triton")
    kinds = {"cuda": ("cuda",), "triton": ("cuda", "cpu")}.get(name, ("cpu",))
    if device == "auto":
        interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        device = "cuda" if "cuda" in kinds and not interpreted else "cpu"
    if device not in kinds:
        raise ValueError(f"attention {name!r} runs on {' or '.join(kinds)}, device is {device!r}")
    if device == "cuda" and not has_gpu:
        raise ValueError(f"device 'cuda' (attention {name!r}): torch sees no CUDA GPU here")
    takes_float32 = name in ("cpu", "reference")
    if dtype == "auto":  # bfloat16 where there are instructions for it, since it halves the weights to read, and where
        # the weights stay in their few bits
        is_fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        is_fast |= is_quantized and config.tensor_parallel_size == 1 and quantized_is_fast()
        dtype = "bfloat16" if is_fast or not takes_float32 else "float32"
    if dtype == "float32" and not takes_float32:
        raise ValueError(f"attention {name!r} takes bfloat16 and float16, dtype is float32")
    cache_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    if cache_dtype != dtype and not cache_dtype.startswith("fp8"):
        raise ValueError(f"kv_cache_dtype is {cache_dtype!r}, expected the model's dtype ({dtype}) or an FP8 one")
    ops = getattr(torch.ops, pagedkern.load_ops(name))
    return Backend(name, torch.device(device), ops, DTYPES[dtype], DTYPES[cache_dtype])


# What a config.json may leave out because transformers has a default for it.
_FAMILIES = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "head_dim": 128},
}


class ModelConfig:
    """What a config.json says of a model."""

    def __init__(self, config: dict):
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported, expected 'silu'")
        name = self.architecture = (config.get("architectures") or ["LlamaForCausalLM"])[0]
        if name not in _FAMILIES:
            raise ValueError(f"architecture {name!r} is not supported, expected one of {', '.join(_FAMILIES)}")
        config = _FAMILIES[name] | config
        self.vocab_size: int = config["vocab_size"]
        self.hidden_size: int = config["hidden_size"]
        self.intermediate_size: int = config["intermediate_size"]
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config.get("num_key_value_heads") or self.num_heads
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not divide by {self.num_kv_heads} key/value heads")
        self.head_dim: int = config.get("head_dim") or self.hidden_size // self.num_heads
        self.max_position = int(config.get("max_position_embeddings", 2048))
        self.rope = Rope(config, self.head_dim, self.max_position)
        self.rms_norm_eps = float(config.get("rms_norm_eps", 1e-6))
        self.tie_word_embeddings: bool = config.get("tie_word_embeddings", False)
        is_qwen2, has_bias = name == "Qwen2ForCausalLM", config.get("attention_bias") or False
        self.attention_bias: bool = is_qwen2 or has_bias  # of queries, keys and values
        self.output_bias: bool = has_bias and not is_qwen2  # of the attention's output
        self.mlp_bias: bool = config.get("mlp_bias", False)
        self.qk_norm = name == "Qwen3ForCausalLM"  # every head's query and key are normalised before they are rotated
        self.sliding_windows = _sliding_windows(config, name)
        self.eos_token_ids = frozenset(token for token in config["eos_token_id"] if 0 <= token < self.vocab_size)


def model_config_from_hf(path: Path) -> ModelConfig:
    """Reads config.json, and generation_config.json where there is one (it may name more end tokens)."""
    config = json.loads((path / "config.json").read_text())
    generation_path = path / "generation_config.json"
    generation = json.loads(generation_path.read_text()) if generation_path.exists() else {}
    ends = [config.get("eos_token_id"), generation.get("eos_token_id")]
    tokens = [token for end in ends for token in (end if isinstance(end, list) else [end]) if token is not None]
    return ModelConfig(config | {"eos_token_id": tokens})


def _sliding_windows(config: dict, architecture: str) -> tuple[int | None, ...]:
    """Of each layer: Mistral has one in all, Qwen in those that layer_types names, or that follow max_window_layers."""
    num_layers, window = config["num_hidden_layers"], config.get("sliding_window")
    is_qwen = architecture.startswith("Qwen")
    if architecture == "LlamaForCausalLM" or (is_qwen and not config.get("use_sliding_window")) or window is None:
        return (None,) * num_layers
    first = config.get("max_window_layers", 28) if is_qwen else 0
    by_index = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    kinds = config.get("layer_types") or by_index
    if set(kinds) - {"sliding_attention", "full_attention"} or len(kinds) != num_layers:
        raise ValueError(f"layer_types is {kinds}, expected {num_layers} of sliding_attention and full_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
