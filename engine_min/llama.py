"""Llama, Mistral, Qwen2 and Qwen3: pre-norm blocks of grouped-query attention and a gated MLP."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from tqdm import tqdm

from engine_min.attention import Attention
from engine_min.config import ModelConfig
from engine_min.kv_cache import is_scale
from engine_min.layers import Linear, rms_norm, silu_and_mul
from engine_min.loader import Checkpoint, check_names
from engine_min.parallel import TensorParallel
from engine_min.quantized import QuantizedLayers, QuantizedLinear, QuantizedTensor, concatenate, is_fast
from engine_min.rope import rope_inv_freq, rope_table

_TABLE = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # computed here


class LlamaLayer:
    def __init__(self, index: int, config: ModelConfig, weights: _Weights):
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        heads, kv_heads, rows = config.num_heads, config.num_kv_heads, config.intermediate_size
        queries_keys_values = {
            attention + "q_proj": heads,
            attention + "k_proj": kv_heads,
            attention + "v_proj": kv_heads,
        }
        self.index = index
        self.input_norm = weights.load(prefix + "input_layernorm.weight")
        self.qkv = weights.linear(queries_keys_values, config.attention_bias)
        self.head_norms = None
        if config.qk_norm:
            self.head_norms = [weights.load(f"{attention}{which}_norm.weight") for which in "qk"]
        self.out = weights.linear({attention + "o_proj": heads}, config.output_bias, by_input=True)
        self.post_norm = weights.load(prefix + "post_attention_layernorm.weight")
        self.gate_up = weights.linear({mlp + "gate_proj": rows, mlp + "up_proj": rows}, config.mlp_bias)
        self.down = weights.linear({mlp + "down_proj": rows}, config.mlp_bias, by_input=True)
        self.eps = config.rms_norm_eps
        self.parallel = weights.parallel
        local = self.parallel.local(config)
        self.num_heads = (local.num_heads, local.num_kv_heads)
        self.head_dim = config.head_dim

    def __call__(self, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        qkv = self.qkv(rms_norm(x, self.input_norm, self.eps))
        if self.head_norms is not None:
            self.normalise_heads(qkv)
        x = self._add(self.out, attention(self.index, qkv), x)
        return self._add(self.down, silu_and_mul(self.gate_up(rms_norm(x, self.post_norm, self.eps))), x)

    def _add(self, linear: Linear, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x + linear(hidden), where each process may have a part of the linear's inputs."""
        if self.parallel.size == 1:
            return linear(hidden, residual=x)
        return self.parallel.sum(linear(hidden)).add_(x)

    def normalise_heads(self, qkv: torch.Tensor) -> None:
        rows = qkv.view(qkv.size(0), -1, self.head_dim)
        for part, weight in zip(
            rows[:, : sum(self.num_heads)].split(self.num_heads, dim=1), self.head_norms, strict=True
        ):
            part.copy_(F.rms_norm(part, (self.head_dim,), weight, self.eps))


class _Weights:
    """Reads a checkpoint's tensors, each checked for its shape, and makes linears of this process's part of them."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | None, progress: bool,
                 parallel: TensorParallel):  # fmt: skip
        self.parallel = parallel
        self._shapes = tensor_shapes(checkpoint.config)
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self.progress = tqdm(total=len(self._shapes), desc="loading", disable=not progress)
        self._keep_quantized = is_fast(dtype, device)

    def _checked(self, name: str, tensor):
        self.progress.update()
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(f"{name} is {list(tensor.shape)}, expected {list(self._shapes[name])}")
        return tensor

    def load(self, name: str) -> torch.Tensor:
        return self._checked(name, self._checkpoint.tensor(name)).to(self._device, self._dtype)

    def load_float(self, name: str) -> torch.Tensor:
        """One that has been loaded before, unrounded."""
        return self._checkpoint.tensor(name).float()

    def linear(self, names: dict[str, int], bias: bool, by_input: bool = False) -> Linear | QuantizedLinear:
        """One linear of those named, one below the other. The processes share each by its outputs or by its inputs, in
        so many units; what is cut by its inputs is summed, so one process alone adds the bias."""
        dim = int(by_input)
        biases = None
        if bias:
            parts = [self.load(f"{name}.bias") for name in names]
            if not by_input:
                parts = [self.parallel.part(part, 0, units) for part, units in zip(parts, names.values(), strict=True)]
            biases = torch.cat(parts) if not by_input or self.parallel.rank == 0 else None
        stored = concatenate([self._quantized(f"{name}.weight", dim, units) for name, units in names.items()])
        if stored is not None:
            return QuantizedLinear(stored, biases)
        weight = [self.parallel.part(self.load(f"{name}.weight"), dim, units) for name, units in names.items()]
        return Linear(torch.cat(weight), biases)

    def head(self, name: str, embedding: torch.Tensor | None) -> Linear | QuantizedLinear:
        """The linear to the vocabulary; `embedding` is its weight where the model ties them."""
        stored = self._checkpoint.quantized(name) if self._keep_quantized and self.parallel.size == 1 else None
        if stored is not None:
            return QuantizedLinear(stored if embedding is not None else self._checked(name, stored))
        return Linear(self.parallel.vocabulary(self.load(name) if embedding is None else embedding))

    def _quantized(self, name: str, dim: int, units: int) -> QuantizedTensor | None:
        """The weight in the few bits that it is stored in, unless a cut would part weights that share a scale."""
        stored = self._checkpoint.quantized(name) if self._keep_quantized else None
        if stored is None:
            return None
        self._checked(name, stored)
        if dim == 1 and self.parallel.size > 1:
            groups = stored.scale.size(1)
            units = groups if units == stored.shape[1] else units
            if groups % units or units % self.parallel.size:
                return None
        return stored.map(lambda part: self.parallel.part(part, dim, units))


class LlamaModel:
    def __init__(self, checkpoint: Checkpoint, max_position: int, dtype: torch.dtype, device: torch.device | None,
                 parallel: TensorParallel, progress: bool):  # fmt: skip
        config = self.config = checkpoint.config
        self.parallel = parallel
        # A tied model's own lm_head is ignored, as the family's definition says that the embedding is the head.
        tied_head = {"lm_head.weight"} if config.tie_word_embeddings else set()
        shapes = tensor_shapes(config)
        ignored = {name for name in checkpoint.names if is_scale(name) or _TABLE.search(name)}
        check_names(checkpoint.names - tied_head - ignored, set(shapes))
        weights = _Weights(checkpoint, dtype, device, progress, parallel)
        self.embedding = weights.load("model.embed_tokens.weight")
        self.layers = [LlamaLayer(i, config, weights) for i in range(config.num_layers)]
        self.norm = weights.load("model.norm.weight")
        if config.tie_word_embeddings:
            self.head = weights.head("model.embed_tokens.weight", self.embedding)
        else:
            self.head = weights.head("lm_head.weight", None)
        self.quantized_layers = None
        if parallel.size == 1 and QuantizedLayers.fit(self.layers):
            self.quantized_layers = QuantizedLayers(self.layers, weights.load_float)
        factors = weights.load("rope_freqs.weight") if config.rope.type == "factors" else None
        weights.progress.close()
        inv_freq = rope_inv_freq(config.rope, factors)
        self.cos_sin_cache = rope_table(inv_freq, max_position, config.rope.attention_factor)

    def __call__(self, token_ids: torch.Tensor, attention: Attention) -> torch.Tensor:
        """[num_tokens] ids of a mixed batch to [num_tokens, hidden] states."""
        x = F.embedding(token_ids, self.embedding)
        if self.quantized_layers is not None:
            return self.quantized_layers(x, attention)
        for layer in self.layers:
            x = layer(x, attention)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] states to [rows, vocab]; the caller picks the rows that sample."""
        eps = self.config.rms_norm_eps
        if isinstance(self.head, QuantizedLinear):
            return self.head(hidden, norm=self.norm.float(), eps=eps)
        logits = self.head(rms_norm(hidden.to(self.norm.dtype), self.norm, eps))
        return self.parallel.gather(logits, self.config.vocab_size)


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
    biased = {"o_proj": config.output_bias} | dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.attention_bias)
    biased |= dict.fromkeys(gated, config.mlp_bias)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            for which in "qk":
                shapes[f"{prefix}self_attn.{which}_norm.weight"] = (config.head_dim,)
        for part, linears in (("self_attn", attention), ("mlp", gated)):
            for name, shape in linears.items():
                shapes[f"{prefix}{part}.{name}.weight"] = shape
                if biased[name]:
                    shapes[f"{prefix}{part}.{name}.bias"] = shape[:1]
    return shapes
