"""Checkpoints: a model's config, its tensors under Hugging Face's names, and its tokenizer."""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.quants import dequantize
from safetensors import safe_open
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from engine_min.config import ModelConfig, model_config_from_hf
from engine_min.tokenizer import Tokenizer, tokenizer_from_hf
from pagedkern.quantized import GROUP, QuantizedTensor


class Checkpoint:
    """config.json beside model.safetensors, or beside shards listed in model.safetensors.index.json."""

    is_quantized = False  # all linears of its layers are in the few bits that the engine has a use for

    def __init__(self, path: Path):
        self._path = path
        self.config = model_config_from_hf(path)
        index, shards = path / "model.safetensors.index.json", {"model.safetensors"}
        if index.exists():
            shards = set(json.loads(index.read_text())["weight_map"].values())
        absent = sorted(name for name in shards if not (path / name).exists())
        if absent:
            raise FileNotFoundError(f"{path} lacks {', '.join(absent)}")
        files = [safe_open(str(path / shard), framework="pt") for shard in sorted(shards)]
        self._files = {name: file for file in files for name in file.keys()}
        self.names = set(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def quantized(self, name: str) -> QuantizedTensor | None:
        """The tensor in the few bits that it is stored in, where the engine has a use for them."""

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_hf(self._path)


@contextmanager
def reading(model: str) -> Iterator[None]:
    """Whatever a damaged file makes its readers stumble over is one kind of error, which names the checkpoint."""
    try:
        yield
    except (OSError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        if type(error) is ValueError:  # says in words what is wrong
            raise
        what = "lacks the key" if isinstance(error, KeyError) else f"cannot be read: {type(error).__name__}:"
        raise ValueError(f"{model} {what} {error}") from error


def open_checkpoint(model: str) -> Checkpoint:
    path = Path(model).expanduser()
    with reading(model):
        if path.is_file() and path.suffix == ".gguf":
            return GGUFCheckpoint(path)
        if (path / "config.json").exists():
            return Checkpoint(path)
    raise FileNotFoundError(f"{model!r} is neither a directory with a config.json nor a .gguf file")


# ---- GGUF.

_KEPT = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0)
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
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
_CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
_CONTROL_TOKEN, _USER_TOKEN = 3, 4  # tokenizer.ggml.token_type
_WORDS = (  # of Llama 3 and Qwen 2, which differ in how many digits stand together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _BYTES = (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cuts) for cuts in (True, False))
# How text is cut into words before the merges; GGUF names the rule after the first model that had it.
_SPLITS = {
    "default": [_GPT2],
    "gpt-2": [_GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _GPT2],
    "llama-bpe": [pre_tokenizers.Split(Regex(_WORDS % "{1,3}"), "isolated"), _BYTES],
    "qwen2": [pre_tokenizers.Split(Regex(_WORDS % ""), "isolated"), _BYTES],
}


class _Reader(GGUFReader):
    """An array of strings is a list here. The package makes two numpy views of each string, and takes two seconds for
    the vocabulary of a small model."""

    def _get_field_parts(self, orig_offs: int, raw_type: int):
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, length = struct.unpack_from("<IQ", self.data, orig_offs)
        start = end = orig_offs + 12
        if kind != GGUFValueType.STRING:
            values = self._get(start, self.gguf_scalar_to_np[kind], length)
            return 12 + values.nbytes, [values], [0], [GGUFValueType.ARRAY, kind]
        view, length_at, strings = memoryview(self.data), struct.Struct("<Q").unpack_from, []
        for _ in range(length):
            start = end + 8
            end = start + length_at(view, end)[0]
            strings.append(str(view[start:end], "utf-8"))
        return end - orig_offs, [strings], [0], [GGUFValueType.ARRAY, kind]


class GGUFCheckpoint(Checkpoint):
    def __init__(self, path: Path):
        try:
            reader = _Reader(path, "c")
            ends = {name: (field.parts[-1], field) for name, field in reader.fields.items()}
            self._metadata = {name: x if isinstance(x, list) else field.contents() for name, (x, field) in ends.items()}
        except Exception as error:
            raise ValueError(f"{path} is not a GGUF file, or a damaged one: {error}") from error
        self._tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
        self.names = set(self._tensors)
        kinds = {tensor.tensor_type for name, tensor in self._tensors.items() if name.endswith("_proj.weight")}
        self.is_quantized = kinds <= set(_KEPT)
        self.config = _config(self._metadata, self.names)

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._tensors[name]
        return self._in_hf_order(name, torch.from_numpy(dequantize(stored.data, stored.tensor_type)))

    def quantized(self, name: str) -> QuantizedTensor | None:
        """A matrix of 4-bit or 8-bit blocks as it is stored; None if the tensor is of another kind."""
        stored = self._tensors[name]
        if stored.tensor_type not in _KEPT or stored.data.ndim != 2:
            return None
        raw, groups = torch.from_numpy(stored.data), int(stored.shape[0]) // GROUP
        blocks = self._in_hf_order(name, raw.view(len(raw), groups, -1))
        scale = blocks[..., :2].view(torch.float16).squeeze(-1)
        if stored.tensor_type == GGMLQuantizationType.Q8_0:
            return QuantizedTensor(blocks[..., 2:], scale)
        if stored.tensor_type == GGMLQuantizationType.Q4_1:
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
        split, tokens = own.get("pre", "default"), own["tokens"]
        if split not in _SPLITS:
            raise ValueError(f"GGUF pre-tokenizer {split!r} is not supported, expected {', '.join(_SPLITS)}")
        merges = [tuple(merge.split(" ", 1)) for merge in own.get("merges", [])]
        vocab, is_llama3 = {token: i for i, token in enumerate(tokens)}, split == "llama-bpe"
        # Llama 3 takes a whole word that is a token as it is, without merging its way there.
        backend = BackendTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3))
        backend.pre_tokenizer = pre_tokenizers.Sequence(_SPLITS[split])
        if split == "qwen2":
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens([
            AddedToken(token, special=kind == _CONTROL_TOKEN, normalized=False)
            for token, kind in zip(tokens, own.get("token_type", []), strict=False)
            if kind in (_CONTROL_TOKEN, _USER_TOKEN)
        ])  # fmt: skip
        bos, eos = (tokens[own[key]] if key in own else None for key in ("bos_token_id", "eos_token_id"))
        return Tokenizer(backend, own.get("tokenizer.chat_template"), bos, eos, own.get("add_bos_token", is_llama3))


def _hf_name(name: str) -> str:
    """A name not known here stays as it is: it then shows up as an unexpected tensor."""
    stem, _, kind = name.rpartition(".")  # blk.<layer>.<part>.<weight | bias>, or <part>.weight
    layer, dot, part = stem.rpartition(".")
    return f"{layer.replace('blk', 'model.layers')}{dot}{_NAMES[part]}.{kind}" if part in _NAMES else name


def _config(metadata: dict, names: set[str]) -> ModelConfig:
    """The facts of a config.json are under `<architecture>.*`; some show by which tensors there are."""
    arch = metadata["general.architecture"]
    own = {key.removeprefix(f"{arch}."): value for key, value in metadata.items()}
    has_divisors, rope_type = "rope_freqs.weight" in names, own.get("rope.scaling.type", "none")
    head_dim = own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    config = {name: own[key] for name, key in _CONFIG_KEYS.items()} | {
        "architectures": [f"{arch.capitalize()}ForCausalLM"],
        "vocab_size": own.get("vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        "num_key_value_heads": own.get("attention.head_count_kv"),
        "head_dim": head_dim,
        "rope_theta": own.get("rope.freq_base"),
        "rope_scaling": {
            "rope_type": "default" if has_divisors or rope_type == "none" else rope_type,
            "factor": own.get("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": own.get("rope.scaling.original_context_length"),
        },
        "tie_word_embeddings": "lm_head.weight" not in names,
        "eos_token_id": [token for token in ends if token is not None],
    }
    model = ModelConfig(config)
    model.rope.rotary_dim = own.get("rope.dimension_count") or head_dim
    model.rope.has_divisors = has_divisors
    model.attention_bias = "model.layers.0.self_attn.q_proj.bias" in names
    model.output_bias = "model.layers.0.self_attn.o_proj.bias" in names
    return model
