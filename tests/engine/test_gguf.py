"""GGUF files: blocks to floats, metadata to a config, permuted q and k rows back to halves."""

import random

import numpy as np
import pytest
import torch
from checkpoints import BYTES, EOS
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize

from engine_min import SamplingParams
from engine_min.checkpoint import GGUFCheckpoint, open_checkpoint
from pagedkern.quantized import QuantizedLinear, is_fast

Q = GGMLQuantizationType


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The order of q and k rows in a GGUF file: the two halves of a head interleaved."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, kind=None, extra=(), plain=(), pre="gpt-2", merges=()):
    config = model.config
    writer = GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*BYTES, "<s>", "</s>", *("".join(merge) for merge in merges)])
    writer.add_token_types([1] * 256 + [3, 3] + [1] * len(merges))
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(EOS)
    names = {"model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "lm_head.": "output."}
    names |= {"model.layers.": "blk.", "self_attn.o_proj": "attn_output", "self_attn.": "attn_", "mlp.": "ffn_"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "_proj": ""}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        for heads, part in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            if part in name and config.model_type == "llama":
                values = permute(values, heads)
        for old, new in names.items():
            name = name.replace(old, new)
        if kind is not None and values.ndim == 2 and not any(part in name for part in plain):
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    for name, values in extra:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_same_model_as_the_directory_it_was_made_from(make_llama, make_llm, tap, tmp_path):
    path, model = make_llama(rms_norm_eps=2.0**-20)  # the file holds it in float32
    gguf = write_gguf(tmp_path / "model.gguf", model)
    config, expected = open_checkpoint(str(gguf)).config, open_checkpoint(str(path)).config
    assert torch.equal(config.rope.table(512), expected.rope.table(512))
    assert vars(config) | {"rope": None} == vars(expected) | {"rope": None}
    rows, tokens = [], []
    for source in (path, gguf):
        llm = make_llm(source)
        rows.append(tap(llm).rows)
        outputs = llm.generate(["Sea and land.", "A🙂"], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        tokens.append([(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs])
    assert tokens[0] == tokens[1]
    for key, row in rows[0].items():
        torch.testing.assert_close(rows[1][key], row, atol=0, rtol=0)


@pytest.mark.parametrize("kind", [Q.Q4_1, Q.Q5_0, Q.F16, Q.BF16])
def test_quantised_file_gives_the_dequantised_weights(make_llama, make_llm, tmp_path, kind):
    _, model = make_llama(tie_word_embeddings=True)
    del model.lm_head
    gguf = write_gguf(tmp_path / "model.gguf", model, kind=kind)
    checkpoint = open_checkpoint(str(gguf))
    assert checkpoint.config.tie_word_embeddings
    weight = model.model.layers[1].self_attn.q_proj.weight.detach().numpy()
    expected = gguf_dequantize(quantize(weight, kind), kind)  # rows are quantised one by one: the order is free
    assert torch.equal(checkpoint.tensor("model.layers.1.self_attn.q_proj.weight"), torch.from_numpy(expected))
    assert len(make_llm(gguf).generate("x", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0])
@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"])
def test_kept_values_and_scales_are_the_weights(make_llama, tmp_path, kind, part):
    _, model = make_llama()
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "model.gguf", model, kind=kind)))
    name = f"model.layers.1.{part}.weight"
    kept, expected = checkpoint.quantized(name), checkpoint.tensor(name)
    assert kept.shape == tuple(expected.shape)
    if kind == Q.Q8_0:
        weights = kept.values.view(torch.int8) * kept.scale.float().unsqueeze(-1)
    else:
        values = torch.cat((kept.values & 15, kept.values >> 4), dim=-1)
        weights = values * kept.scale.float().unsqueeze(-1) + kept.minimum.float().unsqueeze(-1)
    torch.testing.assert_close(weights.flatten(1), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [Q.F32, Q.Q5_0])
def test_other_weights_are_not_kept(make_llama, tmp_path, kind):
    _, model = make_llama()
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "model.gguf", model, kind=kind)))
    assert checkpoint.quantized("model.layers.0.mlp.up_proj.weight") is None


def test_a_minimum_that_float16_cannot_hold_is_not_kept(make_llama, tmp_path):
    _, model = make_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] = -1e5  # 8 times its scale of 12,500 is no float16
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "model.gguf", model, kind=Q.Q4_0)))
    assert checkpoint.quantized("model.layers.0.mlp.up_proj.weight") is None
    assert checkpoint.quantized("model.layers.0.mlp.gate_proj.weight") is not None


def kept_layers(llm):
    model = llm.runner.model
    linears = [x for layer in model.layers for x in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return [isinstance(x, QuantizedLinear) for x in [*linears, model.head]]


@pytest.mark.skipif(not is_fast(), reason="needs a CPU with AVX2")
@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0])
@pytest.mark.parametrize("variant", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_kept_weights_come_close_to_bfloat16(make_llama, make_llm, tap, tmp_path, monkeypatch, kind, variant):
    """Against float32; the same model in bfloat16 is the measure. 8 bits over a group's range are steps of 0.45 % of a
    normal distribution's width, bfloat16 rounds inputs and weights by 0.17 % each."""
    _, model = make_llama(**variant)
    if "tie_word_embeddings" in variant:
        del model.lm_head
    gguf = write_gguf(tmp_path / "model.gguf", model, kind=kind)
    prompts = [[(i * 37 + j * 11) % 256 for j in range(length)] for i, length in enumerate((1, 5, 16, 33, 150))]
    rows = {}
    for name, dtype, kept in (("exact", "float32", 0), ("kept", "bfloat16", 9), ("bfloat16", "bfloat16", 0)):
        if name == "bfloat16":
            monkeypatch.setattr("engine_min.llama.is_fast", lambda *_: False)
        llm = make_llm(gguf, dtype=dtype)
        assert sum(kept_layers(llm)) == kept
        taken = tap(llm).rows
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0))
        rows[name] = torch.stack([taken[o.request_id, len(o.prompt_token_ids)] for o in outputs]).double()
    error = {name: float((rows[name] - rows["exact"]).norm()) for name in ("kept", "bfloat16")}
    assert 0 < error["kept"] < 3 * error["bfloat16"]


@pytest.mark.skipif(not is_fast(), reason="needs a CPU with AVX2")
def test_a_file_of_mixed_kinds_keeps_what_it_can(make_llama, make_llm, tap, tmp_path):
    """Some linears in 4 bits, some in bfloat16: each is called by itself then."""
    _, model = make_llama()
    mixed = write_gguf(tmp_path / "mixed.gguf", model, kind=Q.Q4_1, plain=("attn_v", "ffn_down"))
    llm = make_llm(mixed, dtype="bfloat16")
    assert kept_layers(llm) == [False, True, True, False] * 2 + [True]
    exact = make_llm(mixed)
    rows = []
    for engine in (llm, exact):
        taken = tap(engine).rows
        (output,) = engine.generate("Sea and land.", SamplingParams(max_tokens=1, temperature=0))
        rows.append(taken[output.request_id, len(output.prompt_token_ids)].double())
    assert 0 < (rows[0] - rows[1]).norm() < 0.05 * rows[1].norm()


MERGES = [tuple(merge.split()) for merge in ("1 2", "12 3", "123 4", "Ġ 1234", "Ġ a", "Ġa b", "Ċ Ċ", "' s", "Ã ©")]


@pytest.mark.parametrize(
    "pre, expected",
    [
        ("gpt-2", ["Ġ1234", "5", "'s"]),
        ("smollm", ["Ġ", "1", "2", "3", "4", "5", "'s"]),
        ("llama-bpe", ["Ġ", "123", "4", "5", "'s"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4", "5", "'s"]),
    ],
)
def test_how_digits_are_cut(make_llama, tmp_path, pre, expected):
    _, model = make_llama()
    gguf = write_gguf(tmp_path / "model.gguf", model, pre=pre, merges=MERGES)
    assert open_checkpoint(str(gguf)).tokenizer().backend.encode(" 12345's").tokens == expected


def test_text_of_qwen_is_cut_as_by_its_own_tokenizer(make_llama, tmp_path):
    from transformers import Qwen2Tokenizer

    _, model = make_llama()
    tokenizer = open_checkpoint(str(write_gguf(tmp_path / "model.gguf", model, pre="qwen2", merges=MERGES))).tokenizer()
    vocab = tokenizer.backend.get_vocab()
    own = Qwen2Tokenizer(vocab=vocab, merges=MERGES, unk_token="</s>", eos_token="</s>", pad_token="</s>")
    rng = random.Random(3)
    pieces = ["\r\n", *" \n\t_²é世🙂", "  ", "ab", " ab", "1234", " 12", "'s", "'S", "'ll", "e\u0301", "?!"]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        assert tokenizer.encode(text) == own(text)["input_ids"], text


def test_rope_factors_of_the_file_divide_the_frequencies(make_llama, make_llm, tap, tmp_path):
    _, model = make_llama()
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    llm = make_llm(write_gguf(tmp_path / "model.gguf", model, extra=[("rope_freqs.weight", factors)]))
    angle = 100.0 / (10000.0 ** (2 / 16)) / factors[1]
    torch.testing.assert_close(llm.runner.model.cos_sin_cache[100, 1], torch.tensor(np.cos(angle)), atol=1e-5, rtol=0)


def test_unexpected_tensor_is_named(make_llama, make_llm, tmp_path):
    _, model = make_llama()
    gguf = write_gguf(tmp_path / "model.gguf", model, extra=[("blk.0.attn_sinks.weight", np.ones(16, np.float32))])
    with pytest.raises(ValueError, match="unexpected blk.0.attn_sinks.weight"):
        make_llm(gguf)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match="is not a GGUF file"):
        GGUFCheckpoint(path)


def test_damaged_files_are_refused(make_llama, make_llm, tmp_path):
    _, model = make_llama()
    path = write_gguf(tmp_path / "model.gguf", model)
    raw = path.read_bytes()
    for length in range(40, len(raw), len(raw) // 40):
        path.write_bytes(raw[:length])
        with pytest.raises(ValueError, match="is not a GGUF file, or a damaged one"):
            open_checkpoint(str(path))
    key = b"llama.block_count"
    at = raw.index(key) + len(key)
    path.write_bytes(raw[:at] + b"\x0d" + raw[at + 1 :])
    with pytest.raises(ValueError, match="a damaged one: .*13.* is not a valid GGUFValueType"):
        open_checkpoint(str(path))
