"""The Llama family: pre-norm blocks of grouped-query attention and a gated MLP."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F

from engine_min.attention import Attention
from engine_min.config import ModelConfig
from engine_min.layers import Linear, rms_norm, rope_inv_freq, rope_table, silu_and_mul
from engine_min.loader import Checkpoint, Progress, check_names

_IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|self_attn\.([kv]_proj\.)?[kv]_scale$")


class LlamaLayer:
    def __init__(self, index: int, config: ModelConfig, load, load_int4):
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."

        def linear(names: list[str], bias: bool) -> Linear:
            weight = torch.cat([load(name + ".weight") for name in names])
            biases = torch.cat([load(name + ".bias") for name in names]) if bias else None
            int4 = [load_int4(name + ".weight") for name in names]
            fused = None if None in int4 else tuple(map(torch.cat, zip(*int4, strict=True)))
            return Linear(weight, biases, fused)

        self.index = index
        self.input_norm = load(prefix + "input_layernorm.weight")
        self.qkv = linear([attention + x for x in ("q_proj", "k_proj", "v_proj")], config.attention_bias)
        self.out = linear([attention + "o_proj"], config.attention_bias)
        self.post_norm = load(prefix + "post_attention_layernorm.weight")
        self.gate_up = linear([mlp + "gate_proj", mlp + "up_proj"], config.mlp_bias)
        self.down = linear([mlp + "down_proj"], config.mlp_bias)
        self.eps = config.rms_norm_eps

    def __call__(self, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        attended = attention(self.index, self.qkv(rms_norm(x, self.input_norm, self.eps)))
        x = self.out(attended, residual=x)
        hidden = silu_and_mul(self.gate_up(rms_norm(x, self.post_norm, self.eps)))
        return self.down(hidden, residual=x)


class LlamaModel:
    def __init__(self, checkpoint: Checkpoint, max_position: int, dtype: torch.dtype, progress: Progress,
                 device: torch.device | None = None):  # fmt: skip
        config = self.config = checkpoint.config
        shapes = tensor_shapes(config)
        # A tied model's own lm_head is ignored, as the family's definition says that the embedding is the head.
        tied_head = {"lm_head.weight"} if config.tie_word_embeddings else set()
        check_names(checkpoint.names - tied_head, set(shapes), lambda name: bool(_IGNORED.search(name)))
        done = 0

        def load(name: str) -> torch.Tensor:
            nonlocal done
            done += 1
            progress(done, len(shapes))
            tensor = checkpoint.tensor(name)
            if tensor.shape != shapes[name]:
                raise ValueError(f"{name} is {list(tensor.shape)}, expected {list(shapes[name])}")
            return tensor.to(device, dtype)

        def load_int4(name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
            return checkpoint.tensor_int4(name) if dtype == torch.bfloat16 else None

        self.embedding = load("model.embed_tokens.weight")
        self.layers = [LlamaLayer(i, config, load, load_int4) for i in range(config.num_layers)]
        self.norm = load("model.norm.weight")
        self.head = Linear(self.embedding if config.tie_word_embeddings else load("lm_head.weight"))
        factors = load("rope_freqs.weight") if config.rope.type == "factors" else None
        self.cos_sin_cache = rope_table(rope_inv_freq(config.rope, factors), max_position)

    def __call__(self, token_ids: torch.Tensor, attention: Attention) -> torch.Tensor:
        """[num_tokens] ids of a mixed batch to [num_tokens, hidden] states."""
        x = F.embedding(token_ids, self.embedding)
        for layer in self.layers:
            x = layer(x, attention)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] states to [rows, vocab]; the caller picks the rows that sample."""
        return self.head(rms_norm(hidden, self.norm, self.config.rms_norm_eps))


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this model holds, by its Hugging Face name."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.rope.type == "factors":
        shapes["rope_freqs.weight"] = (config.rope.rotary_dim // 2,)
    attention = {"q_proj": (q_size, hidden), "k_proj": (kv_size, hidden), "v_proj": (kv_size, hidden)}
    attention["o_proj"] = (hidden, q_size)
    gated = {"gate_proj": (mlp, hidden), "up_proj": (mlp, hidden), "down_proj": (hidden, mlp)}
    parts = [("self_attn", attention, config.attention_bias), ("mlp", gated, config.mlp_bias)]
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for part, linears, bias in parts:
            for name, shape in linears.items():
                shapes[f"{prefix}{part}.{name}.weight"] = shape
                if bias:
                    shapes[f"{prefix}{part}.{name}.bias"] = shape[:1]
    return shapes
