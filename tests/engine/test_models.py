"""Random Llama checkpoints against transformers: logits to 1e-4 in float32 over every variant of the family."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_min import SamplingParams
from engine_min.config import model_config_from_hf
from engine_min.llama import rms_norm
from engine_min.rope import Rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 32},  # 4 x 32 is not the hidden size of 64
    "multi_head": {"num_key_value_heads": 4},
    "multi_query": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0} | LLAMA3},
}
PROMPTS = [[(i * 37 + j * 11) % 256 for j in range(length)] for i, length in enumerate((1, 5, 16, 33, 150))]


def check_logits(llm, tap, model, budget_note=""):
    rows = tap(llm).rows
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    with torch.inference_mode():
        for output in outputs:
            tokens = output.prompt_token_ids + output.outputs[0].token_ids
            logits = model(torch.tensor([tokens])).logits[0]
            for length in range(len(output.prompt_token_ids), len(tokens)):
                torch.testing.assert_close(
                    rows[output.request_id, length],
                    logits[length - 1],
                    atol=1e-4,
                    rtol=0,
                    msg=lambda m: m + budget_note,
                )


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(make_llama, make_llm, tap, variant):
    path, model = make_llama(**VARIANTS[variant])
    check_logits(make_llm(path), tap, model)


@pytest.mark.parametrize("budget", (16, 17, 100, 1024))
@pytest.mark.parametrize("block_size", (1, 5, 16, 64))
def test_chunks_and_block_sizes_leave_the_logits_alone(make_llama, make_llm, tap, budget, block_size):
    path, model = make_llama()
    llm = make_llm(path, max_num_batched_tokens=budget, block_size=block_size, num_blocks=512)
    check_logits(llm, tap, model, f" at budget {budget}, block size {block_size}")


def test_sharded_checkpoint(make_llama, make_llm, tap):
    path, model = make_llama(shard_size="40KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    check_logits(make_llm(path), tap, model)
    next(iter(path.glob("model-00002-*"))).unlink()
    with pytest.raises(FileNotFoundError, match="model-00002"):
        make_llm(path)


def test_bfloat16_is_no_worse_than_transformers(make_llama, make_llm, tap):
    """Both round weights and activations to bfloat16; the residual added before rounding must not cost anything."""
    path, model = make_llama()
    llm = make_llm(path, dtype="bfloat16")
    rows = tap(llm).rows
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=1, temperature=0))
    ours = torch.stack([rows[output.request_id, len(output.prompt_token_ids)] for output in outputs]).float()
    with torch.inference_mode():
        exact = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
        model.bfloat16()
        theirs = torch.stack([model(torch.tensor([prompt])).logits[0, -1].float() for prompt in PROMPTS])
    assert 0 < (ours - exact).norm() < 1.1 * (theirs - exact).norm()


# ---- Rope settings as checkpoints spell them (field cases 45 to 47).


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e15])  # well below sqrt(eps), above it, far above
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(rows, size, dtype):
    x, weight = (torch.randn(rows, 576) * size).to(dtype), torch.randn(576).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, rtol=tolerance, atol=1e-30)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rms_norm_keeps_nan_and_infinity_visible(bad):
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    x[0, 5] = bad
    assert rms_norm(x, x, 1e-5)[0, 5].isnan()


def config_with(path: Path, **changes):
    config = json.loads((path / "config.json").read_text())
    for key in ("rope_parameters", "rope_theta", "rope_scaling"):
        config.pop(key, None)
    (path / "config.json").write_text(json.dumps(config | changes))
    return model_config_from_hf(path)


@pytest.mark.parametrize(
    "spelling, expected_type",
    [
        ({}, "default"),
        ({"rope_scaling": None}, "default"),
        ({"rope_scaling": {"type": "default"}}, "default"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, "llama3"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, "llama3"),
    ],
)
def test_rope_spellings(make_llama, spelling, expected_type):
    path, _ = make_llama()
    rope = config_with(path, rope_theta=5e5, **spelling).rope
    assert (rope.type, rope.theta, rope.rotary_dim) == (expected_type, 5e5, 16)
    assert rope.factor == {"default": 1.0, "linear": 2.0, "llama3": 8.0}[expected_type]


def test_rope_errors(make_llama):
    path, _ = make_llama()
    with pytest.raises(ValueError, match="rope type 'spiral' is not supported"):
        config_with(path, rope_scaling={"type": "spiral", "factor": 2.0})
    with pytest.raises(ValueError, match="'llama3' lacks low_freq_factor, high_freq_factor"):
        config_with(path, rope_scaling={"rope_type": "llama3", "factor": 8.0})
    with pytest.raises(ValueError, match="'linear' lacks factor"):
        config_with(path, rope_scaling={"rope_type": "linear", "factor": None})
    with pytest.raises(ValueError, match="rope factor 0.0 of type 'yarn', expected a positive number"):
        config_with(path, rope_scaling={"rope_type": "yarn", "factor": 0})


def test_rope_values_that_say_nothing(make_llama):
    path, _ = make_llama()
    plain = config_with(path).rope
    said_nothing = config_with(path, rope_scaling={"type": "default", "factor": 0}, rotary_dim=8)  # no key of theirs
    assert torch.equal(said_nothing.rope.inv_freq(), plain.inv_freq())
    yarn = {"rope_type": "yarn", "factor": "4", "beta_fast": 0, "truncate": None}
    rope = config_with(path, rope_scaling=yarn).rope
    other = config_with(path, rope_scaling=yarn | {"factor": 4.0, "beta_fast": 32.0, "truncate": False}).rope
    assert rope.factor == 4.0 and torch.equal(rope.inv_freq(), other.inv_freq())
    assert not torch.equal(rope.inv_freq(), config_with(path, rope_scaling=yarn | {"truncate": True}).rope.inv_freq())


@pytest.mark.parametrize("factor", (8.0, 32.0))
def test_llama3_frequencies(factor):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    scaling |= {"factor": factor, "original_max_position_embeddings": 8192}
    config = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=scaling)
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    ours = Rope({"rope_parameters": scaling}, 128, 131072).inv_freq()
    assert attention_factor == 1.0
    torch.testing.assert_close(ours, expected, atol=0, rtol=1e-6)


def test_partial_rotary_keeps_the_frequencies_of_its_own_width(make_llama):
    path, _ = make_llama(head_dim=64)
    rope = config_with(path, rope_theta=1e4, partial_rotary_factor=0.25).rope
    assert rope.rotary_dim == 16
    torch.testing.assert_close(rope.inv_freq()[1], torch.tensor(1e4 ** (-2 / 16)))


# ---- Names: what is missing or too much is an error that says so (field cases 43 and 44).


def edit(path: Path, drop=(), add=()):
    tensors = load_file(path / "model.safetensors")
    for name in drop:
        del tensors[name]
    tensors |= {name: tensor for name, tensor in add}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.bias", "model.norm.weight"],
)
def test_missing_tensor_is_named(make_llama, make_llm, name):
    path, _ = make_llama(attention_bias=True)
    edit(path, drop=[name, "model.layers.0.mlp.up_proj.weight"])
    with pytest.raises(ValueError, match="missing .*") as error:
        make_llm(path)
    assert name in str(error.value) and "model.layers.0.mlp.up_proj.weight" in str(error.value)


def test_missing_tensors_of_a_model_too_large_to_hold(make_llama, make_llm):
    """They are named before there is memory for what is there, or for what is not."""
    path, _ = make_llama()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 2**40, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="missing model.layers.2.input_layernorm.weight, .*"):
        make_llm(path)


def test_a_tensor_of_whole_numbers_is_refused(make_llama, make_llm):
    path, _ = make_llama()
    name = "model.layers.0.self_attn.q_proj.weight"
    edit(path, drop=[name], add=[(name, torch.ones(64, 64, dtype=torch.int8))])
    with pytest.raises(ValueError, match=f"{name} holds torch.int8, expected floating point numbers"):
        make_llm(path)


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: bytes(len(raw))])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_damaged_files_are_one_clear_error(make_llama, make_llm, name, damage):
    path, _ = make_llama()
    raw = (path / name).read_bytes()
    (path / name).write_bytes(damage(raw))
    with pytest.raises(ValueError, match=f"{path} cannot be read: .*"):
        make_llm(path)
    (path / name).write_bytes(raw)
    make_llm(path)


def test_unexpected_tensor_is_named(make_llama, make_llm):
    path, _ = make_llama()
    edit(path, add=[("model.layers.0.self_attn.q_norm.weight", torch.ones(16))])
    with pytest.raises(ValueError, match="unexpected model.layers.0.self_attn.q_norm.weight"):
        make_llm(path)


def test_rotary_buffers_of_old_checkpoints_are_ignored(make_llama, make_llm, tap):
    path, model = make_llama()
    edit(path, add=[("model.layers.0.self_attn.rotary_emb.inv_freq", torch.full((8,), 9.0))])
    check_logits(make_llm(path), tap, model)


def test_tied_model_ignores_a_head_of_its_own(make_llama, make_llm, tap):
    path, model = make_llama(tie_word_embeddings=True)
    edit(path, add=[("lm_head.weight", torch.zeros(288, 64))])
    check_logits(make_llm(path), tap, model)


def test_untied_model_without_head_is_an_error(make_llama, make_llm):
    path, _ = make_llama()
    edit(path, drop=["lm_head.weight"])
    with pytest.raises(ValueError, match="missing lm_head.weight"):
        make_llm(path)
    config = json.loads((path / "config.json").read_text())
    config.pop("tie_word_embeddings", None)  # not said: the family's default is untied
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="missing lm_head.weight"):
        make_llm(path)


def test_wrong_shape_is_named(make_llama, make_llm):
    path, _ = make_llama()
    edit(
        path,
        drop=["model.layers.0.mlp.down_proj.weight"],
        add=[("model.layers.0.mlp.down_proj.weight", torch.ones(64, 95))],
    )
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.down_proj.weight is \[64, 95\], expected \[64, 96\]"):
        make_llm(path)


def test_unknown_models_are_refused(make_llama, make_llm, tmp_path):
    path, _ = make_llama()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ValueError, match="'OtherForCausalLM' is not supported, expected one of LlamaForCausalLM"):
        make_llm(path)
    (path / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "vocab_size"}))
    with pytest.raises(ValueError, match="model lacks the key 'vocab_size'"):
        make_llm(path)
    for name in ("rms_norm_eps", "max_position_embeddings"):
        (path / "config.json").write_text(json.dumps(config | {name: [1]}))
        with pytest.raises(ValueError, match="model cannot be read: TypeError: .* not 'list'"):
            make_llm(path)
    with pytest.raises(FileNotFoundError, match="neither a directory with a config.json nor a .gguf file"):
        make_llm(tmp_path / "nowhere")
