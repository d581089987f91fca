"""Llama, Mistral, Qwen2 and Qwen3: pre-norm blocks of grouped-query attention and a gated MLP."""

import re

import torch
import torch.nn.functional as F
from tqdm import tqdm

from engine_min.attention import SCALE_NAME, Attention
from engine_min.checkpoint import Checkpoint
from engine_min.config import Backend, ModelConfig
from engine_min.parallel import TensorParallel
from pagedkern.quantized import Chain, QuantizedLinear, QuantizedTensor, concatenate, is_fast, step

_COMPUTED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # here, whatever a checkpoint says


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


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a model, under Hugging Face's names."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    linears = {  # name: outputs, inputs, whether it has a bias
        "self_attn.q_proj": (queries, hidden, config.attention_bias),
        "self_attn.k_proj": (keys, hidden, config.attention_bias),
        "self_attn.v_proj": (keys, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    layer = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    layer |= {f"{name}.weight": (outputs, inputs) for name, (outputs, inputs, _) in linears.items()}
    layer |= {f"{name}.bias": (outputs,) for name, (outputs, _, has_bias) in linears.items() if has_bias}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    if config.rope.has_divisors:
        shapes["rope_freqs.weight"] = (config.rope.rotary_dim // 2,)
    return shapes


class Weights:
    """A checkpoint's tensors, each of the expected shape, and linears made of this process's part of them.

    Random or left out weights give fluent nonsense, so a missing tensor is an error, and so is one that has no place.
    """

    def __init__(self, checkpoint: Checkpoint, backend: Backend, parallel: TensorParallel):
        self.config, self.parallel = checkpoint.config, parallel
        self.shapes = tensor_shapes(self.config)
        self._checkpoint, self._backend = checkpoint, backend
        self._keeps_quantized = parallel.size == 1 and backend.device.type == "cpu" and is_fast()
        self._keeps_quantized &= backend.dtype == torch.bfloat16  # float32 asks for exact products
        unexpected = checkpoint.names - self.shapes.keys()
        unexpected = {name for name in unexpected if not (SCALE_NAME.fullmatch(name) or _COMPUTED.search(name))}
        if self.config.tie_word_embeddings:  # by definition the embedding is the head, whatever else there is
            unexpected.discard("lm_head.weight")
        surprises = {"missing": self.shapes.keys() - checkpoint.names, "unexpected": unexpected}
        problems = [f"{kind} {', '.join(sorted(names))}" for kind, names in surprises.items() if names]
        if problems:
            raise ValueError(f"the checkpoint does not fit the model: {'; '.join(problems)}")

    def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._checked(name, self._checkpoint.tensor(name))
        if not tensor.is_floating_point():
            raise ValueError(f"{name} holds {tensor.dtype}, expected floating point numbers")
        return tensor.to(self._backend.device, dtype or self._backend.dtype)

    def _checked(self, name: str, tensor):
        if tuple(tensor.shape) != self.shapes[name]:
            raise ValueError(f"{name} is {list(tensor.shape)}, expected {list(self.shapes[name])}")
        return tensor

    def linear(self, *names: str, unit: int = 1, by_input: bool = False) -> Linear | QuantizedLinear:
        """One linear of those named, one below the other. The processes share its outputs or its inputs, never less
        than a unit; what is cut by its inputs is summed, so one process alone adds the bias."""

        def part(name: str, dim: int) -> torch.Tensor:
            return self.parallel.part(self.load(name), dim, unit)

        bias = None
        if f"{names[0]}.bias" in self.shapes and not by_input:
            bias = torch.cat([part(f"{name}.bias", 0) for name in names])
        elif f"{names[0]}.bias" in self.shapes and self.parallel.rank == 0:
            bias = self.load(f"{names[0]}.bias")
        stored = self._quantized(*(f"{name}.weight" for name in names))
        if stored is not None:
            return QuantizedLinear(stored, bias)
        return Linear(torch.cat([part(f"{name}.weight", int(by_input)) for name in names]), bias)

    def head(self, embedding: torch.Tensor) -> Linear | QuantizedLinear:
        """The linear to the vocabulary, whose weight is the embedding where the model ties them."""
        is_tied = self.config.tie_word_embeddings
        stored = self._quantized("model.embed_tokens.weight" if is_tied else "lm_head.weight")
        if stored is not None:
            return QuantizedLinear(stored)
        return Linear(embedding if is_tied else self.load("lm_head.weight"))

    def _quantized(self, *names: str) -> QuantizedTensor | None:
        """One matrix of those named, in the few bits that all of them are stored in."""
        if not self._keeps_quantized:
            return None
        stored = ((name, self._checkpoint.quantized(name)) for name in names)
        return concatenate([tensor and self._checked(name, tensor) for name, tensor in stored])


class LlamaLayer:
    def __init__(self, index: int, weights: Weights):
        config, self.index, prefix = weights.config, index, f"model.layers.{index}."
        attention, mlp, head = prefix + "self_attn.", prefix + "mlp.", config.head_dim
        self.input_norm = weights.load(prefix + "input_layernorm.weight")
        self.qkv = weights.linear(attention + "q_proj", attention + "k_proj", attention + "v_proj", unit=head)
        self.head_norms = None
        if config.qk_norm:
            self.head_norms = [weights.load(f"{attention}{which}_norm.weight") for which in "qk"]
        self.out = weights.linear(attention + "o_proj", unit=head, by_input=True)
        self.post_norm = weights.load(prefix + "post_attention_layernorm.weight")
        self.gate_up = weights.linear(mlp + "gate_proj", mlp + "up_proj")
        self.down = weights.linear(mlp + "down_proj", by_input=True)
        self.eps, self.head_dim, self.parallel = config.rms_norm_eps, head, weights.parallel
        local = self.parallel.local(config)
        self.num_heads = (local.num_heads, local.num_kv_heads)

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


class QuantizedLayers:
    """The layers of a model whose linears are all of this kind: one call from attention to attention.

    The states stay in float32 from layer to layer, which costs nothing here.
    """

    def __init__(self, layers: list[LlamaLayer], weights: Weights):
        eps = layers[0].eps
        self._layers = layers
        self._widths = layers[0].gate_up.out_features // 2, layers[0].qkv.out_features
        self._chains = []
        steps = []  # buffers: states, MLP, qkv, what attention gave
        for layer in layers:
            names = (f"model.layers.{layer.index}.{kind}_layernorm.weight" for kind in ("input", "post_attention"))
            norms = [weights.load(name, torch.float32) for name in names]
            self._chains.append(Chain([*steps, step(layer.qkv, 0, 2, norms[0])], eps))
            steps = [
                step(layer.out, 3, 0, accumulate=True),
                step(layer.gate_up, 0, 1, norms[1], gated=True),
                step(layer.down, 1, 0, accumulate=True),
            ]
        self._last = Chain(steps, eps)

    def __call__(self, embedded: torch.Tensor, attention: Attention) -> torch.Tensor:
        buffers = states, _, qkv = [embedded.float(), *(embedded.new_empty(len(embedded), n) for n in self._widths)]
        for layer, chain in zip(self._layers, self._chains, strict=True):
            chain(buffers)
            if layer.head_norms is not None:
                layer.normalise_heads(qkv)
            buffers = [*buffers[:3], attention(layer.index, qkv)]
        self._last(buffers)
        return states


class LlamaModel:
    def __init__(self, checkpoint: Checkpoint, max_position: int, backend: Backend, parallel: TensorParallel):
        config = self.config = checkpoint.config
        weights = Weights(checkpoint, backend, parallel)
        self.embedding = weights.load("model.embed_tokens.weight")
        layers = tqdm(range(config.num_layers), "loading layers", disable=parallel.rank > 0 or None)
        self.layers = [LlamaLayer(i, weights) for i in layers]
        self.norm = weights.load("model.norm.weight")
        self.head = weights.head(self.embedding)
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        are_quantized = all(isinstance(linear, QuantizedLinear) for linear in linears)
        self.quantized_layers = QuantizedLayers(self.layers, weights) if are_quantized else None
        has_divisors = config.rope.has_divisors
        divisors = weights.load("rope_freqs.weight", torch.float32).cpu() if has_divisors else None
        self.cos_sin_cache = config.rope.table(max_position, divisors)

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
        return self.head(rms_norm(hidden.to(self.norm.dtype), self.norm, eps))
