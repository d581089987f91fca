"""Decode steps as CUDA graphs: on a GPU, and with attention="cpu" and "vgpu" captured by what stands for one elsewhere
(recorded_graph.py). And uploads that nobody waits for."""

from functools import partial

import pytest
import recorded_graph
import torch

from engine_min import SamplingParams, runner
from engine_min.runner import StepGraphs
from pagedkern.testing.backends import hopper

NEEDS_GPU = pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")
ON_GPU = [pytest.param(name, marks=NEEDS_GPU) for name in ("cuda", "triton")]
ATTENTION = [*ON_GPU, "cpu", "vgpu"]


def prompts(count, length=5):
    return [[(7 * i + 3 * j) % 250 for j in range(length + i % 3)] for i in range(count)]


def tokens_of(llm, given, count=8):
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(given, params)]


@pytest.fixture
def pair(make_llama, make_llm, monkeypatch):
    """An engine with graphs, and one that runs the very steps that the other has captured: nothing may differ."""
    path, _ = make_llama(max_position_embeddings=4096)

    def make(attention, **options):
        settings = dict(attention=attention, dtype="bfloat16", num_blocks=600, max_num_seqs=12) | options
        # A single bfloat16 row on the CPU is normalised by a number, which no graph could follow.
        if attention == "cpu":
            settings |= {"dtype": "float32", "max_num_seqs": 5}
        elif attention == "vgpu":
            settings |= {"dtype": "float16", "max_num_seqs": 3}
        steps = make_llm(path, enforce_eager=True, **settings)
        if attention in ("cpu", "vgpu"):
            recorded_graph.replace_cuda(monkeypatch)
            # To be captured, whatever the device of its buffers.
            capturing = lambda record, sizes, device: StepGraphs(record, sizes, torch.device("cuda"))  # noqa: E731
            monkeypatch.setattr(runner, "StepGraphs", capturing)
        graphs = make_llm(path, **settings)
        sizes = graphs.runner.graphs.sizes
        steps.runner.graphs = StepGraphs(steps.runner._recorded_step, sizes, torch.device("cpu"))
        return graphs, steps

    return make


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_graphs_draw_the_tokens_of_the_steps_they_captured(pair, attention, cache):
    """Field case 29: every batch size, each bucket used; what other batches left in the buffers does not matter."""
    graphs, steps = pair(attention, kv_cache_dtype=cache)
    largest = graphs.runner.graphs.sizes[-1]
    length = 8 if attention != "vgpu" else 4
    for count in (*range(1, largest + 2), 3, 1):
        assert tokens_of(graphs, prompts(count), length) == tokens_of(steps, prompts(count), length), count
    assert all(graphs.runner.graphs.replays.values())


@pytest.mark.parametrize("attention", ATTENTION)
def test_one_recording_serves_every_length(pair, attention):
    """Field case 30: captured with no keys at all."""
    graphs, steps = pair(attention, max_model_len=2100)
    for length in (16, 1020, 2050, 9) if attention != "vgpu" else (16, 300, 9):
        assert tokens_of(graphs, prompts(2, length)) == tokens_of(steps, prompts(2, length)), length


@pytest.mark.parametrize("attention", ATTENTION)
def test_capture_touches_no_page(pair, attention):
    """Field case 28."""
    graphs, _ = pair(attention)
    graphs.generate(prompts(3), SamplingParams(max_tokens=4, ignore_eos=True))
    graphs.kv_cache.storage.fill_(float("nan"))
    graphs.runner.record()
    if attention in ("cuda", "triton"):
        torch.cuda.synchronize()
    assert graphs.kv_cache.storage.isnan().all()


@pytest.mark.parametrize("attention", ON_GPU)
def test_chunks_that_draw_nothing_do_not_overtake_each_other(pair, attention):
    """The host goes on to the next chunk at once, and must not fill buffers that are still being uploaded."""
    free, waiting = pair(attention, max_num_batched_tokens=16, max_model_len=2100)
    run = waiting.runner.step
    waiting.runner.step = lambda batch: (run(batch), torch.cuda.synchronize())[0]
    for _ in range(3):
        torch.cuda._sleep(10**8)
        assert tokens_of(free, prompts(2, 2000)) == tokens_of(waiting, prompts(2, 2000))
        for llm in (free, waiting):
            llm.blocks.reset_prefix_cache()


# ---- what stands for a graph is one


@pytest.fixture
def capture(monkeypatch):
    recorded_graph.replace_cuda(monkeypatch)
    return runner._capture


def test_a_replay_sees_tensors_and_no_python(capture):
    rows, number = torch.ones(4), [2.0]
    replay, _ = capture(lambda: rows * number[0] + rows.sum(), None)
    rows.fill_(3)
    number[0] = 100.0
    assert replay().tolist() == [18.0] * 4


@pytest.mark.parametrize(
    "step",
    [lambda x: x * x.sum().item(), lambda x: x[x > 0], lambda x: x if x.any() else -x, lambda x: x.nonzero()],
    ids=["item", "mask", "branch", "nonzero"],
)
def test_steps_that_wait_for_a_result_are_refused(capture, step):
    with pytest.raises(RuntimeError, match="waits for its result"):
        capture(partial(step, torch.ones(3)), None)


def test_graphs_of_a_pool_destroy_each_others_results(capture):
    x = torch.ones(3)
    first, pool = capture(lambda: x + 1, None)
    second, _ = capture(lambda: x + 2, pool)
    kept = first()
    assert kept.tolist() == [2, 2, 2]
    assert second().tolist() == [3, 3, 3] and kept.tolist() != [2, 2, 2]
