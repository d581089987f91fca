"""Checkpoints: named tensors of a Hugging Face directory or a GGUF file, under Hugging Face's names."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine_min.config import model_config_from_gguf, model_config_from_hf
from engine_min.quantized import QuantizedTensor


class SafetensorsCheckpoint:
    """config.json beside model.safetensors, or beside shards listed in model.safetensors.index.json."""

    def __init__(self, path: Path):
        from safetensors import safe_open

        self.config = model_config_from_hf(path)
        self.gguf_metadata = None
        index, shards = path / "model.safetensors.index.json", {"model.safetensors"}
        if index.exists():
            shards = set(json.loads(index.read_text())["weight_map"].values())
        absent = sorted(name for name in shards if not (path / name).exists())
        if absent:
            raise FileNotFoundError(f"{path} lacks {', '.join(absent)}")
        self._files = {}
        for shard in sorted(shards):
            file = safe_open(str(path / shard), framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))
        self.names = set(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def quantized(self, name: str) -> None:
        """The tensor in the few bits that it is stored in, where the engine has a use for them."""


_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER_NAMES = {
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


class GGUFCheckpoint:
    def __init__(self, path: Path):
        from engine_min.gguf_file import GGUFFile

        self.file = GGUFFile(path)
        self.gguf_metadata = self.file.metadata
        self.config = model_config_from_gguf(self.file.metadata, set(self.file.tensors))
        self._sources = {_hf_name(name): name for name in self.file.tensors}
        self.names = set(self._sources)

    def tensor(self, name: str) -> torch.Tensor:
        return self._in_hf_order(name, self.file.tensor(self._sources[name]))

    def quantized(self, name: str) -> QuantizedTensor | None:
        stored = self.file.quantized(self._sources[name])
        return stored and stored.map(lambda part: self._in_hf_order(name, part))

    def _in_hf_order(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A Llama's rows of q and k are stored as pairs (0, d/2), (1, d/2 + 1)... of each head: back to halves."""
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(name.split(".")[-2])
        if heads is None or self.config.architecture != "LlamaForCausalLM":
            return tensor
        return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _hf_name(name: str) -> str:
    """A name not known here stays as it is: it then shows up as an unexpected tensor."""
    parts = name.split(".")  # blk.<layer>.<part>.<weight | bias>
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _GGUF_LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_GGUF_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return _GGUF_NAMES.get(name, name)


Checkpoint = SafetensorsCheckpoint | GGUFCheckpoint


def open_checkpoint(model: str) -> Checkpoint:
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return GGUFCheckpoint(path)
    if (path / "config.json").exists():
        return SafetensorsCheckpoint(path)
    raise FileNotFoundError(f"{model!r} is neither a directory with a config.json nor a .gguf file")


def check_names(present: set[str], expected: set[str]) -> None:
    """Random or left out weights give fluent nonsense, so both kinds of surprise are errors."""
    surprises = {"missing": sorted(expected - present), "unexpected": sorted(present - expected)}
    problems = [f"{kind} {', '.join(names)}" for kind, names in surprises.items() if names]
    if problems:
        raise ValueError(f"the checkpoint does not fit the model: {'; '.join(problems)}")
