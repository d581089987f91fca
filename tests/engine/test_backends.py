"""The engine on each of the backends that need no GPU."""

import dataclasses

import pytest
import torch

import engine_min.engine
from engine_min import SamplingParams
from pagedkern.testing.backends import VGPU_OPS

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


class VirtualGpuOps:
    """The CUDA kernels on the virtual GPU; ops that have none yet run on the CPU, on the same tensors."""

    def __init__(self, ops):
        self._ops = ops

    def __getattr__(self, name):
        has_kernel = name in VGPU_OPS or name.removesuffix("_workspace_size") in VGPU_OPS
        return getattr(self._ops if has_kernel else torch.ops.pagedkern, name)


@pytest.fixture
def virtual_gpu(monkeypatch):
    resolve = engine_min.engine.resolve_backend

    def resolve_with_fallback(config):
        backend = resolve(config)
        return dataclasses.replace(backend, ops=VirtualGpuOps(backend.ops)) if backend.name == "vgpu" else backend

    monkeypatch.setattr(engine_min.engine, "resolve_backend", resolve_with_fallback)


VGPU_WAYS = {
    "bf16": {},
    "e4m3, dynamic scales": {"kv_cache_dtype": "fp8_e4m3"},
    "e5m2, given scales": {"kv_cache_dtype": "fp8_e5m2", "kv_scales": 0.01},
    "float16, small blocks, small chunks": {"dtype": "float16", "block_size": 4, "max_num_batched_tokens": 16},
}


@pytest.mark.parametrize("way", VGPU_WAYS)
def test_virtual_gpu(path, make_llm, virtual_gpu, way):
    """A model on the CUDA kernels, from prompt to text, forks and cached prefixes included, without a GPU."""
    options = {"dtype": "bfloat16"} | VGPU_WAYS[way]
    params = SamplingParams(n=2, max_tokens=4, temperature=1, seed=1, ignore_eos=True, prompt_logprobs=0)
    results = {}
    for attention in ("cpu", "vgpu"):
        llm = make_llm(path, attention=attention, **options)
        first, again = llm.generate(PROMPTS, params), llm.generate(PROMPTS[::-1], params)
        assert all(len(choice.token_ids) == 4 for output in first for choice in output.outputs)
        logprobs = [list(found.values()) for o in [*first, *again[::-1]] for found in o.prompt_logprobs[1:]]
        results[attention] = torch.tensor(logprobs)
        llm.scheduler.check_integrity()
    difference = (results["cpu"] - results["vgpu"]).abs()
    assert difference.mean() < 0.05 and difference.max() < 0.5


def test_virtual_gpu_swaps_and_caches_prefixes(path, make_llm, virtual_gpu):
    """What is moved to the host and back, or found again, is what was computed: logits depend on nothing else."""
    options = dict(attention="vgpu", dtype="bfloat16", block_size=4, max_num_seqs=4)
    roomy = make_llm(path, **options)
    tight = make_llm(path, num_blocks=9, swap_space_gib=0.001, **options)
    prompts = [list(range(40, 52)), list(range(90, 99))]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
    expected = tokens_of(roomy.generate(prompts, params))
    assert tokens_of(roomy.generate(prompts, params)) == expected
    assert roomy.stats().prefix_hit_rate > 0.3
    assert tokens_of(tight.generate(prompts, params)) == expected
    assert tight.stats().preempted > 0
