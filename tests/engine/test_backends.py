"""The engine on each of the backends that need no GPU."""

import pytest
import torch

from engine_min import SamplingParams

PROMPTS = ["The sea.", "A", "Somewhat longer than the others, this one."]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def tokens_of(outputs):
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@pytest.fixture
def path(make_llama):
    return make_llama()[0]


@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2", "kv_scales": 0.01}]
)
def test_reference(path, make_llm, options):
    """The slow judge answers like the kernels, forks and cached prefixes included."""
    params = SamplingParams(n=2, max_tokens=8, temperature=0, ignore_eos=True)
    results = []
    for attention in ("cpu", "reference"):
        llm = make_llm(path, attention=attention, **options)
        results.append([tokens_of(llm.generate(PROMPTS, params)) for _ in range(2)])
    assert results[0] == results[1]


def test_auto_is_the_cpu_here_unless_there_is_a_gpu(path, make_llm):
    llm = make_llm(path, device="cpu")
    assert (llm.backend.name, llm.backend.device.type) == ("cpu", "cpu")
    assert llm.backend.ops is torch.ops.pagedkern


@pytest.mark.parametrize("options, message", [
    ({"attention": "cpu", "device": "cuda"}, "attention 'cpu' runs on cpu, device is 'cuda'"),
    ({"attention": "cuda", "device": "cpu"}, "attention 'cuda' runs on cuda, device is 'cpu'"),
    ({"attention": "vgpu", "dtype": "float32"}, "attention 'vgpu' takes bfloat16 and float16, dtype is float32"),
])  # fmt: skip
def test_what_does_not_go_together(path, make_llm, options, message):
    with pytest.raises(ValueError, match=message):
        make_llm(path, **options)


def test_no_gpu_is_said_clearly(path, make_llm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options in ({"attention": "cuda"}, {"attention": "triton", "device": "cuda"}, {"device": "cuda"}):
        with pytest.raises(ValueError, match="torch sees no CUDA GPU here|attention 'cpu' runs on cpu"):
            make_llm(path, **options)
