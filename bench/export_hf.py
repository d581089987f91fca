"""Writes a checkpoint as a Hugging Face directory, so that other engines can load the very same (dequantised) weights.

python -m bench.export_hf model.gguf directory --dtype float32
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from engine_min.checkpoint import open_checkpoint
from engine_min.config import ModelConfig


def export(model: str, target: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    checkpoint = open_checkpoint(model)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {name: checkpoint.tensor(name).to(dtype).contiguous() for name in checkpoint.names}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    tokenizer = checkpoint.tokenizer()
    tokenizer.backend.save(str(target / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(names, indent=1))
    config = _hf_config(checkpoint.config, str(dtype).removeprefix("torch."))
    (target / "config.json").write_text(json.dumps(config, indent=1))


def _hf_config(config: ModelConfig, dtype: str) -> dict:
    if config.architecture != "LlamaForCausalLM":
        raise ValueError(f"{config.architecture} cannot be exported, expected LlamaForCausalLM")
    if config.rope.type != "default":
        raise ValueError(f"rope type {config.rope.type!r} cannot be exported, expected 'default'")
    eos = sorted(config.eos_token_ids)
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    args = parser.parse_args()
    export(args.model, args.target, getattr(torch, args.dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
