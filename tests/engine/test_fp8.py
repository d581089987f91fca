"""An FP8 cache end to end: scales of the checkpoint, given, or dynamic, on every way through the engine."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_min import SamplingParams
from engine_min.attention import SCALE_NAME
from pagedkern.kv_layout import bytes_per_token

PROMPTS = [[(11 * i + j * j) % 250 for j in range(length)] for i, length in enumerate((40, 17, 3, 33, 40))]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
E4M3, E5M2 = "fp8_e4m3", "fp8_e5m2"
LAYERS, KV_HEADS = 2, 2


def tokens_of(outputs):
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def prompt_logprobs(llm, prompt):
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params)
    return torch.tensor([next(iter(found.values())) for found in output.prompt_logprobs[1:]])


@pytest.fixture
def path(make_llama):
    return make_llama()[0]


def add_scales(path, scales):
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | scales, path / "model.safetensors", metadata={"format": "pt"})


def scale_tensors(pattern="self_attn.{side}_scale", layers=range(LAYERS), value=lambda layer, side: 0.02 * (layer + 1)):
    return {
        f"model.layers.{layer}.{pattern.format(side=side)}": torch.as_tensor(value(layer, side), dtype=torch.float32)
        for layer in layers
        for side in "kv"
    }


@pytest.mark.parametrize("dtype, scales, bound", [
    (E4M3, "dynamic", 0.15), (E5M2, "dynamic", 0.3), (E4M3, 0.02, 0.15), (E5M2, 0.001, 0.3),
])  # fmt: skip
def test_close_to_a_cache_in_full(path, make_llm, dtype, scales, bound):
    """And not equal to it, or the cache would not be what it says."""
    full = prompt_logprobs(make_llm(path), PROMPTS[0])
    llm = make_llm(path, kv_cache_dtype=dtype, kv_scales=scales)
    assert llm.kv_cache.storage.dtype == (torch.float8_e4m3fn if dtype == E4M3 else torch.float8_e5m2)
    difference = (prompt_logprobs(llm, PROMPTS[0]) - full).abs().mean()
    assert 1e-4 < difference < bound


WAYS = {
    "chunked": dict(max_num_batched_tokens=16),
    "recorded, no prefix cache": dict(enable_prefix_caching=False),
    "preempted": dict(block_size=8, num_blocks=14),
    "swapped": dict(block_size=8, num_blocks=14, swap_space_gib=0.01, enable_prefix_caching=False),
}


@pytest.mark.parametrize("scales", ["dynamic", (torch.tensor([0.02, 0.03]), 0.05)], ids=["dynamic", "given"])
@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens(path, make_llm, way, scales):
    """Field case 26: chunks, cached prefixes, and blocks that move take their scales along."""
    options = dict(kv_cache_dtype=E4M3, kv_scales=scales)
    alone = make_llm(path, enforce_eager=True, enable_prefix_caching=False, **options)
    expected = [tokens_of(alone.generate([prompt], GREEDY))[0] for prompt in PROMPTS]
    llm = make_llm(path, **options, **WAYS[way])
    for _ in range(2):
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
    assert (llm.stats().preempted > 0) == (way in ("preempted", "swapped"))
    llm.scheduler.check_integrity()


def test_forks_copy_scales_too(path, make_llm):
    llm = make_llm(path, kv_cache_dtype=E4M3, block_size=8)
    params = SamplingParams(n=3, max_tokens=16, temperature=1, seed=3, ignore_eos=True)
    (output,) = llm.generate([PROMPTS[3]], params)
    apart = make_llm(path, kv_cache_dtype=E4M3, max_num_seqs=1)  # a choice after the other: nothing is shared or copied
    copied = []
    apart.kv_cache.copy = copied.extend
    assert tokens_of(apart.generate([PROMPTS[3]], params)) == tokens_of([output]) and not copied
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3


def test_dynamic_scales_lie_beside_the_tokens(path, make_llm):
    llm = make_llm(path, kv_cache_dtype=E4M3)
    llm.generate([PROMPTS[1]], SamplingParams(max_tokens=1))
    k_scale, v_scale = llm.kv_cache.scales[1]
    assert k_scale.shape == v_scale.shape == (64, 16, KV_HEADS)
    stored = llm.kv_cache.layers[1][0][0].float()  # block 0: of each token and head the largest is the format's own
    assert torch.equal(stored.abs().amax(-1), torch.full((16, KV_HEADS), 448.0))
    assert len(k_scale[0].unique()) > 16


@pytest.mark.parametrize("pattern", ["self_attn.{side}_scale", "self_attn.{side}_proj.{side}_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (KV_HEADS,)])
def test_scales_of_the_checkpoint(path, make_llm, pattern, shape):
    value = {"k": 0.02, "v": 0.05}
    given = [torch.tensor([[value[side] * (layer + 1)] * KV_HEADS for layer in range(LAYERS)]) for side in "kv"]
    expected = make_llm(path, kv_cache_dtype=E4M3, kv_scales=tuple(given))
    add_scales(path, scale_tensors(pattern, value=lambda layer, side: torch.full(shape, value[side] * (layer + 1))))
    llm = make_llm(path, kv_cache_dtype=E4M3)
    assert not llm.kv_cache.dynamic
    assert torch.equal(prompt_logprobs(llm, PROMPTS[0]), prompt_logprobs(expected, PROMPTS[0]))
    assert make_llm(path, kv_cache_dtype=E4M3, kv_scales="dynamic").kv_cache.dynamic
    make_llm(path)  # another cache has no use for them, and does not mind


def test_scales_of_a_checkpoint_are_all_there_and_usable(path, make_llm):
    plain = load_file(path / "model.safetensors")
    cases = [
        (scale_tensors(layers=[1]), "lacks k_scale of layer 0, v_scale of layer 0"),
        (
            scale_tensors(value=lambda layer, side: 0.0),
            "layer 0's k_scale holds a scale that is not finite and positive",
        ),
        (scale_tensors(value=lambda layer, side: float("nan")), "not finite and positive"),
        (scale_tensors(value=lambda layer, side: [1.0, 1.0, 1.0]), r"has 3 elements, expected 1 or 2 \(KV heads\)"),
    ]
    for scales, message in cases:
        save_file(plain | scales, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            make_llm(path, kv_cache_dtype=E4M3)


@pytest.mark.parametrize("scales, message", [
    (0.0, "not finite and positive"),
    ((0.1, -1.0), "not finite and positive"),
    (float("inf"), "not finite and positive"),
    ((0.1, 0.1, 0.1), "kv_scales has 3 entries"),
    (torch.ones(5), r"kv_scales is \[5\], expected a number, \[2\] or \[2, 2\]"),
    ("magic", "kv_scales is 'magic'"),
])  # fmt: skip
def test_given_scales_are_checked(path, make_llm, scales, message):
    with pytest.raises(ValueError, match=message):
        make_llm(path, kv_cache_dtype=E4M3, kv_scales=scales)


def test_scales_need_an_fp8_cache(path, make_llm):
    with pytest.raises(ValueError, match="kv_scales need an FP8 cache, kv_cache_dtype is 'auto'"):
        make_llm(path, kv_scales=0.5)


def test_names_of_scales():
    for name, is_one in {"k_scale": 1, "v_proj.v_scale": 1, "q_scale": 0, "k_proj.weight": 0}.items():
        assert bool(SCALE_NAME.fullmatch(f"model.layers.11.self_attn.{name}")) == is_one


def test_memory_counts_scales(path, make_llm):
    llm = make_llm(path, kv_cache_dtype=E4M3)
    per_token = bytes_per_token(KV_HEADS, 16, torch.float8_e4m3fn, LAYERS, scales=True)
    pools = sum(pool.nbytes for pool in llm.kv_cache._pools)
    assert pools == 64 * 16 * per_token
