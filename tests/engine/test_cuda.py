"""The engine on a real GPU: recorded decode steps as CUDA graphs, and uploads that nobody waits for."""

import pytest
import torch

from engine_min import SamplingParams
from engine_min.runner import StepGraphs
from pagedkern.testing.backends import hopper

pytestmark = pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")
ATTENTION = ("cuda", "triton")


def prompts(count, length=5):
    return [[(7 * i + 3 * j) % 250 for j in range(length + i % 3)] for i in range(count)]


def tokens_of(llm, given, count=8):
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(given, params)]


@pytest.fixture
def pair(make_llama, make_llm):
    """An engine with graphs, and one that runs the very steps that the other has captured: nothing may differ."""
    path, _ = make_llama(max_position_embeddings=4096)

    def make(attention, **options):
        settings = dict(attention=attention, dtype="bfloat16", num_blocks=600, max_num_seqs=12) | options
        graphs, steps = (make_llm(path, enforce_eager=eager, **settings) for eager in (False, True))
        runner, sizes = steps.runner, graphs.runner.graphs.sizes
        runner.graphs = StepGraphs(runner._recorded_step, sizes, torch.device("cpu"))
        return graphs, steps

    return make


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_graphs_draw_the_tokens_of_the_steps_they_captured(pair, attention, cache):
    """Field case 29: every batch size, each bucket used; what other batches left in the buffers does not matter."""
    graphs, steps = pair(attention, kv_cache_dtype=cache)
    for count in (*range(1, 14), 3, 1):
        assert tokens_of(graphs, prompts(count)) == tokens_of(steps, prompts(count)), count
    assert all(graphs.runner.graphs.replays.values())


@pytest.mark.parametrize("attention", ATTENTION)
def test_one_recording_serves_every_length(pair, attention):
    """Field case 30: captured with no keys at all."""
    graphs, steps = pair(attention, max_model_len=2100)
    for length in (16, 1020, 2050, 9):
        assert tokens_of(graphs, prompts(2, length)) == tokens_of(steps, prompts(2, length)), length


@pytest.mark.parametrize("attention", ATTENTION)
def test_capture_touches_no_page(pair, attention):
    """Field case 28."""
    graphs, _ = pair(attention)
    graphs.generate(prompts(3))
    graphs.kv_cache.storage.fill_(float("nan"))
    graphs.runner.record()
    torch.cuda.synchronize()
    assert graphs.kv_cache.storage.isnan().all()


@pytest.mark.parametrize("attention", ATTENTION)
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
