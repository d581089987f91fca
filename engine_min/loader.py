"""Checkpoints: a model's config, its tensors under Hugging Face's names, and its tokenizer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from engine_min.config import model_config_from_hf
from engine_min.quantized import QuantizedTensor
from engine_min.tokenizer import Tokenizer, tokenizer_from_hf


class Checkpoint:
    """config.json beside model.safetensors, or beside shards listed in model.safetensors.index.json."""

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
    except (OSError, ValueError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{model} is no checkpoint that can be read: {type(error).__name__}: {error}") from error


def open_checkpoint(model: str) -> Checkpoint:
    path = Path(model).expanduser()
    with reading(model):
        if path.is_file() and path.suffix == ".gguf":
            from engine_min.gguf_file import GGUFCheckpoint

            return GGUFCheckpoint(path)
        if (path / "config.json").exists():
            return Checkpoint(path)
    raise FileNotFoundError(f"{model!r} is neither a directory with a config.json nor a .gguf file")
