"""GGUF files: metadata and tensors, and the model's config and tokenizer made of them.

The `gguf` package's own reader builds a numpy view for every entry of an array and takes over two seconds for the
vocabulary of a small model; this one takes a tenth of that. The numbers of types, their sizes and the dequantisers are
the package's.
"""

import math
import mmap
import struct
from dataclasses import replace
from pathlib import Path

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize as gguf_dequantize
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from engine_min.config import ModelConfig, model_config
from engine_min.loader import Checkpoint
from engine_min.quantized import GROUP, QuantizedTensor
from engine_min.tokenizer import Tokenizer

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # struct's letters for GGUFValueType
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_KEPT = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0)
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
_CONTROL_TOKEN, _USER_TOKEN = 3, 4  # tokenizer.ggml.token_type
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class GGUFCheckpoint(Checkpoint):
    def __init__(self, path: Path):
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._pos = 0
        magic, version, num_tensors, num_entries = self._read("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{path} is not a GGUF file of version 2 or 3 (magic {magic!r}, version {version})")
        self._metadata = {self._string(): self._value(*self._read("<I")) for _ in range(num_entries)}
        infos = [
            (self._string(), self._read(f"<{self._read('<I')[0]}Q"), *self._read("<IQ")) for _ in range(num_tensors)
        ]
        alignment = self._metadata.get("general.alignment", 32)
        start = -(-self._pos // alignment) * alignment
        self._tensors: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, torch.Tensor]] = {}  # shape, type, bytes
        for name, shape, kind, offset in infos:  # the innermost dimension comes first in the file
            kind = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            size = math.prod(shape) // block * block_bytes
            if offset % alignment or start + offset + size > len(self._map):
                raise ValueError(
                    f"{path} has no {size} bytes for tensor {name} at {start + offset}: it is cut or damaged"
                )
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start + offset)
            self._tensors[_hf_name(name)] = shape[::-1], kind, raw
        self.names = set(self._tensors)
        self.config = _config(self._metadata, self.names)

    def _read(self, layout: str) -> tuple:
        values = struct.unpack_from(layout, self._map, self._pos)
        self._pos += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._read("<Q")
        self._pos += length
        return self._map[self._pos - length : self._pos].decode("utf-8", "replace")

    def _value(self, kind: int):
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind in _SCALARS:
            return self._read("<" + _SCALARS[kind])[0]
        if kind != GGUFValueType.ARRAY:
            raise ValueError(f"GGUF value type {kind} is not known, expected 0 to 12")
        item_kind, length = self._read("<IQ")
        if item_kind in _SCALARS:
            return list(self._read(f"<{length}{_SCALARS[item_kind]}"))
        return [self._value(item_kind) for _ in range(length)]

    def tensor(self, name: str) -> torch.Tensor:
        """Float32, except where the file holds half precision floats, which stay as they are."""
        shape, kind, raw = self._tensors[name]
        return self._in_hf_order(name, dequantize(raw, kind).view(shape))

    def quantized(self, name: str) -> QuantizedTensor | None:
        """A matrix of 4-bit or 8-bit blocks as it is stored; None if the tensor is of another kind."""
        shape, kind, raw = self._tensors[name]
        if kind not in _KEPT or len(shape) != 2:
            return None
        blocks = self._in_hf_order(name, raw.view(shape[0], shape[1] // GROUP, -1))
        scale = blocks[..., :2].view(torch.float16).squeeze(-1)
        if kind == GGMLQuantizationType.Q8_0:
            return QuantizedTensor(blocks[..., 2:], scale)
        if kind == GGMLQuantizationType.Q4_1:
            return QuantizedTensor(blocks[..., 4:], scale, blocks[..., 2:4].view(torch.float16).squeeze(-1))
        minimum = scale * -8
        return QuantizedTensor(blocks[..., 2:], scale, minimum) if minimum.isfinite().all() else None

    def _in_hf_order(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A Llama's rows of q and k are stored as pairs (0, d/2), (1, d/2 + 1)... of each head: back to halves."""
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(name.split(".")[-2])
        if heads is None or self.config.architecture != "LlamaForCausalLM":
            return tensor
        return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    def tokenizer(self) -> Tokenizer:
        """GPT-2 style byte level BPE from the vocabulary and merges in the file."""
        own = {key.removeprefix("tokenizer.ggml."): value for key, value in self._metadata.items()}
        if own["model"] != "gpt2":
            raise ValueError(f"GGUF tokenizer {own['model']!r} is not supported, expected 'gpt2' (byte level BPE)")
        added: list[AddedToken] = []
        split, tokens = own.get("pre", "default"), own["tokens"]
        merges = [tuple(merge.split(" ", 1)) for merge in own.get("merges", [])]
        vocab = {token: i for i, token in enumerate(tokens)}
        # Llama 3 takes a whole word that is a token as it is, without merging its way there.
        backend = BackendTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split == "llama-bpe"))
        backend.pre_tokenizer = _pre_tokenizer(split)
        backend.decoder = decoders.ByteLevel()
        for token, kind in zip(tokens, own.get("token_type", []), strict=False):
            if kind in (_CONTROL_TOKEN, _USER_TOKEN):
                added.append(AddedToken(token, special=kind == _CONTROL_TOKEN, normalized=False))
        backend.add_tokens(added)
        bos, eos = (tokens[own[key]] if key in own else None for key in ("bos_token_id", "eos_token_id"))
        prepend_bos = own.get("add_bos_token", split == "llama-bpe")
        return Tokenizer(backend, own.get("tokenizer.chat_template"), bos, eos, prepend_bos)


def dequantize(raw: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    return raw.view(_PLAIN[kind]) if kind in _PLAIN else torch.from_numpy(gguf_dequantize(raw.numpy(), kind))


def _hf_name(name: str) -> str:
    """A name not known here stays as it is: it then shows up as an unexpected tensor."""
    parts = name.split(".")  # blk.<layer>.<part>.<weight | bias>
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return _NAMES.get(name, name)


def _config(metadata: dict, names: set[str]) -> ModelConfig:
    """The facts of a config.json are under `<architecture>.*`; some show by which tensors there are."""
    arch = metadata["general.architecture"]
    if arch not in _ARCHITECTURES:
        raise ValueError(f"GGUF architecture {arch!r} is not supported, expected {', '.join(_ARCHITECTURES)}")
    own = {key.removeprefix(f"{arch}."): value for key, value in metadata.items()}
    missing = [f"{arch}.{key}" for key in _CONFIG_KEYS.values() if key not in own]
    if missing:
        raise ValueError(f"GGUF metadata lacks {', '.join(missing)}")
    rope_type = "factors" if "rope_freqs.weight" in names else own.get("rope.scaling.type", "none")
    head_dim = own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    config = {name: own[key] for name, key in _CONFIG_KEYS.items()} | {
        "architectures": [_ARCHITECTURES[arch]],
        "vocab_size": own.get("vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        "num_key_value_heads": own.get("attention.head_count_kv"),
        "head_dim": head_dim,
        "rope_theta": own.get("rope.freq_base"),
        "rope_scaling": {
            "rope_type": "default" if rope_type == "none" else rope_type,
            "factor": own.get("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": own.get("rope.scaling.original_context_length"),
        },
        "tie_word_embeddings": "lm_head.weight" not in names,
        "eos_token_id": [token for token in ends if token is not None],
    }
    attention = "model.layers.0.self_attn."
    biases = {"attention_bias": attention + "q_proj.bias" in names, "output_bias": attention + "o_proj.bias" in names}
    model = model_config(config)
    rope = replace(model.rope, rotary_dim=own.get("rope.dimension_count") or head_dim)
    return replace(model, rope=rope, **biases)


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut into words before the merges; GGUF names the rule after the first model that had it."""
    own_rules = {
        "default": [],
        "gpt-2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")],
    }
    if split not in own_rules:
        raise ValueError(f"GGUF pre-tokenizer {split!r} is not supported, expected {', '.join(own_rules)}")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split != "llama-bpe")
    return pre_tokenizers.Sequence([*own_rules[split], byte_level])
