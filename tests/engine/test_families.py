"""Mistral, Qwen2 and Qwen3 against transformers: logits to 1e-4 in float32, over windows, biases, norms and ropes."""

import json

import pytest
import torch
from test_gguf import write_gguf
from test_models import LLAMA3, check_logits, config_with, edit

from engine_min.config import model_config_from_hf
from engine_min.parallel import TensorParallel
from engine_min.rope import Rope

SHORT_RAMP = {"truncate": False, "beta_fast": 8, "beta_slow": 2}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "yarn": YARN,
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 10000.0} | LLAMA3,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 20}
VARIANTS = {
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "mistral-window-of-1": ("Mistral", {"sliding_window": 1}),
    "mistral-plain": ("Mistral", {"sliding_window": None}),
    "mistral-head_dim-tied": ("Mistral", {"sliding_window": 33, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-multi-query": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2-window": ("Qwen2", WINDOW | {"max_window_layers": 1}),
    "qwen2-window-named": ("Qwen2", WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2-window-switched-off": ("Qwen2", {"use_sliding_window": False, "sliding_window": 20, "max_window_layers": 0}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-head_dim-24": ("Qwen3", {"head_dim": 24, "num_key_value_heads": 4}),
    "qwen3-bias-tied": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-window": ("Qwen3", WINDOW | {"head_dim": 16, "max_window_layers": 0}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-untruncated": ("Llama", {"rope_parameters": YARN | SHORT_RAMP}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "llama-yarn-attention-factor": ("Llama", {"rope_parameters": YARN | {"attention_factor": 1.25}}),
    **{f"{family.lower()}-{name}": (family, {"rope_parameters": scaling, "head_dim": 16})
       for family in ("Mistral", "Qwen2", "Qwen3") for name, scaling in SCALINGS.items()},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(make_checkpoint, make_llm, tap, variant):
    family, options = VARIANTS[variant]
    path, model = make_checkpoint(family=family, **options)
    model.set_attn_implementation("eager")
    check_logits(make_llm(path), tap, model)


def test_windows_hold_through_chunks_and_pages(make_checkpoint, make_llm, tap):
    path, model = make_checkpoint(family="Mistral", sliding_window=20)
    check_logits(make_llm(path, max_num_batched_tokens=16, block_size=8, num_blocks=128), tap, model)


@pytest.mark.parametrize("family, scaling", [("Llama", {}), ("Llama", YARN), ("Qwen3", {})])
def test_partial_rotary(make_checkpoint, make_llm, tap, monkeypatch, family, scaling):
    """Field case 47. transformers' models of these families rotate whole heads, so the rest is put past them there."""
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25} | scaling
    path, model = make_checkpoint(family=family, head_dim=32, rope_parameters=parameters)
    module = __import__(f"transformers.models.{family.lower()}.modeling_{family.lower()}", fromlist=["x"])
    whole = module.apply_rotary_pos_emb

    def partial(q, k, cos, sin, *args, **options):
        size = cos.size(-1)
        rotated = whole(q[..., :size], k[..., :size], cos, sin, *args, **options)
        return tuple(torch.cat((part, x[..., size:]), dim=-1) for part, x in zip(rotated, (q, k), strict=True))

    monkeypatch.setattr(module, "apply_rotary_pos_emb", partial)
    if not scaling:  # theirs has the frequencies of the whole width
        model.model.rotary_emb.inv_freq = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    assert model.model.rotary_emb.inv_freq.numel() == 4
    llm = make_llm(path)
    assert llm.model_config.rope.rotary_dim == 8
    check_logits(llm, tap, model)


@pytest.mark.parametrize("rotary_dim, factor, position", [(64, 4.0, 0), (128, 32.0, 1), (32, 1.0, 700)])
def test_yarn_tables(rotary_dim, factor, position):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = YARN | {"factor": factor, "original_max_position_embeddings": 4096}
    config = LlamaConfig(head_dim=rotary_dim, max_position_embeddings=131072, rope_parameters=parameters)
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = Rope({"rope_parameters": parameters}, rotary_dim, 131072)
    ours = rope.inv_freq()
    torch.testing.assert_close(ours, expected, atol=0, rtol=2e-6)
    table = rope.table(1024)[position]
    torch.testing.assert_close(table[0], (position * expected[0]).cos() * attention_factor)


@pytest.mark.parametrize("rotary_dim", (5, 0, 34))
def test_odd_rotary_dimensions_are_refused(make_llama, rotary_dim):
    with pytest.raises(ValueError, match=rf"{rotary_dim} rotary dimensions, expected an even number in \[2, 32\]"):
        config_with(
            make_llama(head_dim=32)[0],
            rope_scaling={"type": "default", "partial_rotary_factor": rotary_dim / 32 or 0.01},
        )


# ---- What a config may leave out, and what a checkpoint may not.


def test_defaults_of_each_family(make_checkpoint):
    path, _ = make_checkpoint(family="Mistral", sliding_window=7)
    config = json.loads((path / "config.json").read_text())

    def read(without, architecture="MistralForCausalLM"):
        left = {key: value for key, value in config.items() if key not in without} | {"architectures": [architecture]}
        (path / "config.json").write_text(json.dumps(left))
        return model_config_from_hf(path)

    assert read([]).sliding_windows == (7, 7)
    missing = read(["sliding_window", "max_position_embeddings", "head_dim"])
    assert (missing.sliding_windows, missing.max_position, missing.head_dim) == ((4096, 4096), 131072, 16)
    qwen = read(["head_dim"], "Qwen3ForCausalLM")
    assert (qwen.head_dim, qwen.qk_norm, qwen.sliding_windows) == (128, True, (None, None))
    config |= {"use_sliding_window": True, "max_window_layers": 1}
    assert read([], "Qwen2ForCausalLM").sliding_windows == (None, 7)
    config["layer_types"] = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="layer_types is .*linear_attention.*, expected 2 of"):
        read([], "Qwen2ForCausalLM")


@pytest.mark.parametrize(
    "family, name, options",
    [
        ("Qwen2", "model.layers.0.self_attn.k_proj.bias", {}),
        ("Qwen2", "lm_head.weight", {}),
        ("Qwen3", "model.layers.1.self_attn.q_norm.weight", {"head_dim": 16}),
        ("Mistral", "model.layers.1.post_attention_layernorm.weight", {}),
    ],
)
def test_missing_tensors_are_named(make_checkpoint, make_llm, family, name, options):
    """Field cases 43 and 44."""
    path, _ = make_checkpoint(family=family, **options)
    edit(path, drop=[name])
    with pytest.raises(ValueError, match=f"missing {name}$"):
        make_llm(path)


@pytest.mark.parametrize("family, name, size", [("Qwen2", "o_proj.bias", 64), ("Mistral", "q_norm.weight", 16)])
def test_tensors_of_another_family_are_named(make_checkpoint, make_llm, family, name, size):
    path, _ = make_checkpoint(family=family)
    edit(path, add=[(f"model.layers.0.self_attn.{name}", torch.ones(size))])
    with pytest.raises(ValueError, match=f"unexpected model.layers.0.self_attn.{name}"):
        make_llm(path)


# ---- Qwen in a GGUF file: its own architectures, whose rows are not permuted.


@pytest.mark.parametrize("family, options", [("Qwen2", {}), ("Qwen3", {"head_dim": 32})])
def test_gguf(make_checkpoint, make_llm, tap, tmp_path, family, options):
    _, model = make_checkpoint(family=family, **options)
    path = write_gguf(tmp_path / "model.gguf", model)
    check_logits(make_llm(path), tap, model)


def test_parts_of_a_model_add_up():
    """What the processes of a parallel model hold is each row once, and KV heads that are too few are shared."""
    weight = torch.arange(24.0).view(12, 2)
    for size in (1, 2, 3, 6):
        parts = [TensorParallel(rank, size).part(weight, 0, 2) for rank in range(size)]
        assert torch.equal(torch.cat(parts), weight)
    shared = [TensorParallel(rank, 4).part(weight, 0, 6) for rank in range(4)]
    assert torch.equal(torch.cat(shared), weight.view(2, 1, 6, 2).expand(2, 2, 6, 2).reshape(24, 2))
