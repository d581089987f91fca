"""Llama, Mistral, Qwen2 and Qwen3: pre-norm blocks of grouped-query attention and a gated MLP."""

import re
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from tqdm import tqdm

from engine_min.attention import Attention
from engine_min.kv_cache import is_scale
from engine_min.loader import Checkpoint
from engine_min.parallel import TensorParallel
from engine_min.quantized import QuantizedLayers, QuantizedLinear, QuantizedTensor, concatenate, is_fast
from engine_min.rope import rope_inv_freq, rope_table

_TABLE = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # computed here


class Linear:
    """y = x W^T + b (+ residual).

    On the CPU the weight is packed once into oneDNN's own layout: 1.4 times (bf16, one row) to 2 times (float32, 16
    rows) as fast as `F.linear`, which works from the plain layout each time (bench/facts.md has the ladder). The
    residual is added in the accumulator, before the one rounding to the output's dtype.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.bias = bias
        self.packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.packed &= weight.dtype not in _NEEDS or _NEEDS[weight.dtype]()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if not self.packed:
            y = F.linear(x, self.weight, self.bias)
            return y if residual is None else y.add_(residual)
        if residual is None:
            return _linear(x, self.weight, self.bias, "none", [], "")
        return _linear_binary(x, residual, self.weight, self.bias, "add")


_linear = torch.ops.mkldnn._linear_pointwise.default
_linear_binary = torch.ops.mkldnn._linear_pointwise.binary
_NEEDS = {  # not every CPU has what these dtypes need there
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside.

    `F.rms_norm` runs nine small kernels. For a single row in bfloat16, where the scale is one number, two do it in half
    the time and with one rounding; float32 keeps to the sums that transformers makes.
    """
    size = weight.size(0)
    if x.size(0) == 1 and x.dtype == torch.bfloat16 and eps > 0 and x.device.type == "cpu":
        norm = torch.linalg.vector_norm(x, dtype=torch.float32).item()
        return torch.addcmul(_ZERO, x, weight, value=(norm * norm / size + eps) ** -0.5)
    return F.rms_norm(x, (size,), weight, eps)


_ZERO = torch.zeros(1, dtype=torch.bfloat16)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class Weights:
    """Reads a checkpoint's tensors, each checked for its shape, and makes linears of this process's part of them."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, parallel: TensorParallel):
        self.config, self.parallel = checkpoint.config, parallel
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._keep_quantized = is_fast(dtype, device)

    def load(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._checked(name, self._checkpoint.tensor(name), shape)
        if not tensor.is_floating_point():
            raise ValueError(f"{name} holds {tensor.dtype}, expected floating point numbers")
        return tensor.to(self._device, dtype or self._dtype)

    def _checked(self, name: str, tensor, shape: tuple[int, ...]):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
        return tensor

    def linear(self, rows: dict[str, int], columns: int, bias: bool, unit: int = 1,
               by_input: bool = False) -> Linear | QuantizedLinear:  # fmt: skip
        """One linear of those named, each with so many rows, one below the other. The processes share its outputs or
        its inputs, never less than a unit; what is cut by its inputs is summed, so one process alone adds the bias."""
        part, dim = self.parallel.part, int(by_input)
        cuts = [(name, count, (columns if by_input else count) // unit) for name, count in rows.items()]
        biases = None
        if bias:
            parts = [part(self.load(f"{name}.bias", n), 0, 1 if by_input else units) for name, n, units in cuts]
            biases = torch.cat(parts) if not by_input or self.parallel.rank == 0 else None
        stored = concatenate([self._quantized(f"{name}.weight", (n, columns), dim, units) for name, n, units in cuts])
        if stored is not None:
            return QuantizedLinear(stored, biases)
        weights = [part(self.load(f"{name}.weight", n, columns), dim, units) for name, n, units in cuts]
        return Linear(torch.cat(weights), biases)

    def head(self, embedding: torch.Tensor) -> Linear | QuantizedLinear:
        """The linear to the vocabulary, whose weight is the embedding where the model ties them."""
        is_tied, shape = self.config.tie_word_embeddings, (self.config.vocab_size, self.config.hidden_size)
        name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
        stored = self._quantized(name, shape, 0, 1) if self.parallel.size == 1 else None
        if stored is not None:
            return QuantizedLinear(stored)
        return Linear(self.parallel.vocabulary(embedding if is_tied else self.load(name, *shape)))

    def _quantized(self, name: str, shape: tuple[int, int], dim: int, units: int) -> QuantizedTensor | None:
        """This process's part in the few bits that it is stored in, unless a cut would part weights of one scale."""
        is_kept = self._keep_quantized and name in self._checkpoint.names
        stored = self._checkpoint.quantized(name) if is_kept else None
        if stored is None:
            return None
        self._checked(name, stored, shape)
        if dim == 1 and self.parallel.size > 1:
            groups = stored.scale.size(1)
            units = groups if units == shape[1] else units
            if groups % units or units % self.parallel.size:
                return None
        return stored.map(lambda tensor: self.parallel.part(tensor, dim, units))


class Names(Weights):
    """The names of what a model asks for, before anything is read or there is memory for it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._asked: set[str] = set()

    def load(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> None:
        self._asked.add(name)

    def linear(self, rows: dict[str, int], columns: int, bias: bool, unit: int = 1, by_input: bool = False) -> None:
        self._asked.update(f"{name}.{kind}" for name in rows for kind in ("weight", "bias")[: 1 + bias])

    def head(self, embedding: None) -> None:
        if not self.config.tie_word_embeddings:
            self._asked.add("lm_head.weight")

    def check(self) -> None:
        """Random or left out weights give fluent nonsense, so both kinds of surprise are errors."""
        names = self._checkpoint.names
        unexpected = {name for name in names - self._asked if not is_scale(name) and not _TABLE.search(name)}
        if self.config.tie_word_embeddings:  # by definition the embedding is the head, whatever else there is
            unexpected.discard("lm_head.weight")
        surprises = {"missing": sorted(self._asked - names), "unexpected": sorted(unexpected)}
        problems = [f"{kind} {', '.join(found)}" for kind, found in surprises.items() if found]
        if problems:
            raise ValueError(f"the checkpoint does not fit the model: {'; '.join(problems)}")


class LlamaLayer:
    def __init__(self, index: int, weights: Weights):
        config, self.index, prefix = weights.config, index, f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
        queries, keys = config.num_heads * head, config.num_kv_heads * head
        self.input_norm = weights.load(prefix + "input_layernorm.weight", hidden)
        rows = {attention + "q_proj": queries, attention + "k_proj": keys, attention + "v_proj": keys}
        self.qkv = weights.linear(rows, hidden, config.attention_bias, unit=head)
        self.head_norms = None
        if config.qk_norm:
            self.head_norms = [weights.load(f"{attention}{which}_norm.weight", head) for which in "qk"]
        self.out = weights.linear({attention + "o_proj": hidden}, queries, config.output_bias, unit=head, by_input=True)
        self.post_norm = weights.load(prefix + "post_attention_layernorm.weight", hidden)
        self.gate_up = weights.linear({mlp + "gate_proj": inner, mlp + "up_proj": inner}, hidden, config.mlp_bias)
        self.down = weights.linear({mlp + "down_proj": hidden}, inner, config.mlp_bias, by_input=True)
        self.eps = config.rms_norm_eps
        self.parallel = weights.parallel
        local = self.parallel.local(config)
        self.num_heads = (local.num_heads, local.num_kv_heads)
        self.head_dim = head

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
        rows = qkv.view(qkv.size(0), -1, self.head_dim)[:, : sum(self.num_heads)]
        for part, weight in zip(rows.split(self.num_heads, dim=1), self.head_norms, strict=True):
            part.copy_(F.rms_norm(part, (self.head_dim,), weight, self.eps))


class LlamaModel:
    def __init__(self, checkpoint: Checkpoint, max_position: int, dtype: torch.dtype, device: torch.device,
                 parallel: TensorParallel):  # fmt: skip
        config = self.config = checkpoint.config
        self.parallel = parallel
        names = Names(checkpoint, dtype, device, parallel)
        self._read(names, range(config.num_layers))
        names.check()
        weights = Weights(checkpoint, dtype, device, parallel)
        layers = tqdm(range(config.num_layers), "loading layers", disable=parallel.rank > 0 or None)
        factors = self._read(weights, layers)
        self.quantized_layers = None
        if parallel.size == 1 and QuantizedLayers.fit(self.layers):
            self.quantized_layers = QuantizedLayers(
                self.layers, lambda name: weights.load(name, config.hidden_size, dtype=torch.float32)
            )
        inv_freq = rope_inv_freq(config.rope, factors)
        self.cos_sin_cache = rope_table(inv_freq, max_position, config.rope.attention_factor)

    def _read(self, weights: Weights, layers: Iterable[int]) -> torch.Tensor | None:
        """All tensors but what is made of them; the rope factors, where the checkpoint has some."""
        config = self.config
        self.embedding = weights.load("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [LlamaLayer(i, weights) for i in layers]
        self.norm = weights.load("model.norm.weight", config.hidden_size)
        self.head = weights.head(self.embedding)
        if config.rope.type != "factors":
            return None
        return weights.load("rope_freqs.weight", config.rope.rotary_dim // 2, dtype=torch.float32)

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
