"""The engine on each of the backends that need no GPU."""

import pytest
import torch

from engine_min import SamplingParams
from pagedkern import vgpu
from pagedkern.testing import triton_vgpu

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


VGPU_WAYS = {
    "bf16": {},
    "e4m3, dynamic scales": {"kv_cache_dtype": "fp8_e4m3"},
    "e5m2, given scales": {"kv_cache_dtype": "fp8_e5m2", "kv_scales": 0.01},
    "float16, small blocks, small chunks": {"dtype": "float16", "block_size": 4, "max_num_batched_tokens": 16},
}


@pytest.mark.parametrize("way", VGPU_WAYS)
def test_virtual_gpu(path, make_llm, way):
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


def test_virtual_gpu_swaps_and_caches_prefixes(path, make_llm):
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


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_every_op_runs_on_the_virtual_gpu(path, make_llm, cache):
    llm = make_llm(path, attention="vgpu", dtype="bfloat16", kv_cache_dtype=cache, block_size=4)
    assert llm.backend.ops is torch.ops.pagedkern_vgpu
    with vgpu.session() as session:
        llm.generate("Sea", SamplingParams(n=2, max_tokens=3, temperature=1, seed=1, ignore_eos=True))
    kernels = " ".join({report["kernel"] for report in session.reports})
    expected = {"rope_reshape_and_cache", "paged_decode", "copy_blocks"}
    expected |= {"reshape_and_cache_dynamic"} if llm.kv_cache.dynamic else set()
    assert all(f"{name}_kernel" in kernels for name in expected), kernels


def test_triton(path, make_llm):
    """Compiled for the GPU and run on the virtual one: a prompt in chunks, decodes beside it, a prefix found again."""
    prompts = [list(range(60, 69)), [225, 104, 155]]
    results = {}
    for attention in ("reference", "triton"):
        llm = make_llm(path, attention=attention, device="cpu", dtype="float16", max_num_seqs=2,
                       max_num_batched_tokens=8, block_size=8)  # fmt: skip
        with triton_vgpu.on_vgpu(), vgpu.session() as session:
            results[attention] = [tokens_of(llm.generate(prompts, GREEDY)) for _ in range(2)]
        assert bool(session.reports) == (attention == "triton")
    assert results["triton"] == results["reference"]
