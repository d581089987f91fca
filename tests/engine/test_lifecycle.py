"""From arrival to end: aborts at any moment, failures, admission, streams, and what a long trace wastes."""

import random

import pytest
import torch
from fake_engine import FakeEngine, random_prompt

from engine_min import SamplingParams, StepError
from engine_min.bench.batching import LONGEST, trace_jobs


@pytest.mark.parametrize("host", [0, 40])
def test_two_hundred_requests_aborted_at_any_moment(host):
    """Field case 39: waiting, in the prompt, decoding, swapped out, after the end, twice, and unknown."""
    rng = random.Random(host)
    engine = FakeEngine(num_blocks=30, block_size=4, max_num_seqs=6, budget=12, max_model_len=64, num_host_blocks=host)
    moments, known, left = set(), [], 200
    while left or engine.has_unfinished():
        if left and rng.random() < 0.5:
            left -= 1
            prompt = random_prompt(rng, known, 40)
            known = [*known[-10:], prompt]
            engine.request(f"r{left}", prompt, n=rng.choice([1, 1, 3]), max_tokens=rng.randint(1, 20))
        if engine.outputs and rng.random() < 0.4:
            swapped = [r.request_id for r in engine.scheduler.waiting if r.host_blocks]
            name = rng.choice(swapped or list(engine.outputs))
            requests = engine._requests.get(name)
            if requests is None:
                moments.add("after the end")
                assert not engine.abort(name)
            else:
                first = requests[0]
                moments.add(
                    "swapped" if first.host_blocks else "waiting" if first.row is None
                    else "prompt" if first.num_pending > 1 else "decoding"
                )  # fmt: skip
                assert engine.abort(name) and not engine.abort(name)
            engine.check()
        assert not engine.abort("unknown")
        engine.step()
        engine.check()
    assert moments >= {"after the end", "waiting", "prompt", "decoding"} and ("swapped" in moments) == (host > 0)
    stats = engine.stats()
    assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0) and min(engine.blocks.ref_counts) == 0
    assert all(output.finished for output in engine.outputs.values())


def test_a_stream_goes_on_after_preemption():
    """Field case 36: the pieces put together are the text, none twice and none lost."""
    engine = FakeEngine(num_blocks=6, block_size=4, max_model_len=24)
    pieces = {"a": "", "b": ""}
    for name in pieces:
        engine.request(name, [1, 2, 3, 4, 5], max_tokens=18)
    preempted_after = None
    while engine.has_unfinished():
        for output in engine.step():
            pieces[output.request_id] += output.outputs[0].new_text
        if preempted_after is None and engine.stats().preempted:
            preempted_after = len(engine.outputs["b"].outputs[0].token_ids)
    assert preempted_after >= 3
    assert pieces == {name: output.outputs[0].text for name, output in engine.outputs.items()}
    assert len(pieces["b"].split()) == 18


def test_new_text_is_what_the_last_step_added():
    engine = FakeEngine()
    output = engine.request("a", [1, 2, 3], n=2, max_tokens=3)
    engine.step()
    engine._requests["a"][0].text.length = 2  # the first choice ends with its next token
    engine.step()
    assert output.outputs[0].finish_reason == "length" and output.outputs[0].new_text
    (same,) = engine.step()
    assert same is output and output.outputs[0].new_text == "" and output.outputs[1].new_text


def test_a_failed_step_fails_the_choices_it_was_about_to_begin():
    engine = FakeEngine()
    failing, waiting = engine.request("a", [1, 2, 3], n=3, max_tokens=5), None
    engine.runner.fail = lambda request: RuntimeError("scripted") if request.request_id == "a" else None
    with pytest.raises(StepError, match=r"a step failed \(scripted\): aborted a") as caught:
        engine.step()
    assert caught.value.failed == [failing] and [c.finish_reason for c in failing.outputs] == ["abort"] * 3
    engine.check()
    waiting = engine.request("b", [1, 2, 3], max_tokens=5)
    engine.run()
    assert waiting.outputs[0].finish_reason == "length" and engine.stats().blocks_used == 0


def test_one_unusable_choice_ends_its_request_and_no_other():
    engine = FakeEngine()
    bad, good = engine.request("bad", [1, 2], n=3, max_tokens=5), engine.request("good", [3, 4], max_tokens=5)
    engine.runner.fail = lambda request: request.request_id == "bad" and request.index == 2 or None
    engine.step()
    with pytest.raises(StepError) as caught:
        engine.step()
    assert (caught.value.failed, caught.value.outputs) == ([bad], [good])
    assert [c.finish_reason for c in bad.outputs] == ["abort"] * 3 and len(bad.outputs[0].token_ids) == 2
    engine.run()
    assert good.outputs[0].finish_reason == "length"


def test_first_come_first_served():
    """A long prompt at the head of the queue is not passed by short ones that would fit."""
    engine = FakeEngine(num_blocks=10, block_size=4, max_num_seqs=4, budget=64, max_model_len=40)
    engine.request("a", list(range(20)), max_tokens=8)
    engine.request("b", list(range(20, 48)), max_tokens=4)
    engine.request("c", [7], max_tokens=30)
    order = []
    while engine.has_unfinished():
        order += [o.request_id for o in engine.step() if o.request_id not in order]
    assert order == ["a", "b", "c"]


def test_without_chunks_a_prompt_runs_whole_or_not_yet():
    engine = FakeEngine(budget=16, max_model_len=16, chunked=False)
    sizes = []
    step = engine.runner.step
    engine.runner.step = lambda batch: (sizes.append([r.num_scheduled for r in batch]), step(batch))[1]
    for name, prompt in (("a", range(9)), ("b", range(10, 18)), ("c", range(20, 23))):
        engine.request(name, prompt, max_tokens=3)
    engine.run()
    assert sizes[:2] == [[9], [1, 8, 3]]


def test_refused_at_once_with_the_numbers(make_llama, make_llm):
    path, _ = make_llama()
    with pytest.raises(ValueError, match=r"256, expected at least max_model_len \(512\) without chunked prefill"):
        make_llm(path, enable_chunked_prefill=False)
    llm = make_llm(path, num_blocks=4)
    with pytest.raises(ValueError, match="60 prompt tokens and max_tokens 10 need 5 KV blocks, the pool has 4"):
        llm.add_request("a", [1] * 60, SamplingParams(max_tokens=10))
    assert not llm.has_unfinished() and llm.stats().waiting == 0


def test_waste_on_a_trace_of_two_hundred_requests():
    """That of `pagedkern-engine bench`. The only empty slots are in last blocks: under 4 % with blocks of 16."""
    engine = FakeEngine(num_blocks=4000, block_size=16, max_num_seqs=16, budget=2048, max_model_len=LONGEST)
    engine.runner.step = lambda batch: [(r, i % 50) for i, r in enumerate(batch) if r.samples]
    for i, job in enumerate(trace_jobs(50, 200, LONGEST)):
        engine.request(str(i), job.prompt, max_tokens=job.num_tokens)
    while engine.has_unfinished():
        engine.step()
    assert 0.02 < engine.stats().fragmentation < 0.04


@pytest.mark.parametrize("dtype, ok", [("bfloat16", True), ("float16", False)])
def test_numbers_beyond_float16_fail_loudly(make_llama, make_llm, dtype, ok):
    """Field case 32: never the same token for ever."""
    path, model = make_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.mul_(300)
        model.model.layers[0].mlp.up_proj.weight.mul_(300)
    model.save_pretrained(path)
    llm = make_llm(path, dtype=dtype)
    if ok:
        (output,) = llm.generate("abc", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 4
    else:
        with pytest.raises(StepError, match="without a finite maximum"):
            llm.generate("abc", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))


@pytest.mark.parametrize("move", ["copy", "swap_out", "swap_in"])
def test_blocks_that_cannot_be_moved_fail_those_who_run(move):
    engine = FakeEngine(num_blocks=8, block_size=4, max_num_seqs=2, max_model_len=32, num_host_blocks=8)
    engine.request("a", [1, 2, 3], n=2 if move == "copy" else 1, max_tokens=20)
    if move != "copy":
        engine.request("b", [4, 5, 6], max_tokens=20)
    engine.step()
    waiting = engine.request("c", [7, 8], max_tokens=5)
    moved, failures = getattr(engine.cache, move), []

    def fail_once(pairs):
        if not failures:
            failures.append(pairs)
            raise RuntimeError("no memory")
        moved(pairs)

    setattr(engine.cache, move, fail_once)
    with pytest.raises(StepError, match="no memory") as caught:
        engine.run()
    assert caught.value.failed and waiting not in caught.value.failed
    engine.run()
    assert waiting.outputs[0].finish_reason == "length" and engine.stats().blocks_used == 0
    assert failures and engine.stats().swapped == 0
