"""The same tokens alone, batched, chunked, preempted, swapped, found in the prefix cache, and in any bucket."""

import itertools

import pytest
import torch

from engine_min import SamplingParams

TEXT = "It was the keeper's habit to count the ships before he lit the lamp, and to write the number down. "
PROMPTS = [TEXT, TEXT[:33], TEXT[:48] + "Not so.", "A", TEXT[5:60], TEXT, "ü🙂 " + TEXT[:20]]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=temperature, seed=seed, ignore_eos=True)
    for temperature, seed in zip((0, 0.8, 0, 1, 0, 0.8, 1), itertools.count(), strict=False)
]


def tokens_of(outputs):
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@pytest.fixture
def path(make_llama):
    return make_llama()[0]


@pytest.fixture
def expected(path, make_llm):
    """Each alone, step by step as they come, nothing shared, nothing recorded."""
    llm = make_llm(path, enable_prefix_caching=False, enforce_eager=True)
    return [tokens_of(llm.generate(prompt, params))[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


WAYS = {
    "batched": dict(),
    "eager": dict(enforce_eager=True),
    "budget 16": dict(max_num_batched_tokens=16),
    "budget 7": dict(max_num_batched_tokens=7, max_num_seqs=3),
    "one token a step": dict(max_num_batched_tokens=1, max_num_seqs=1),
    "not chunked": dict(enable_chunked_prefill=False, max_num_batched_tokens=512),
    "block size 1": dict(block_size=1, num_blocks=600),
    "block size 5": dict(block_size=5, num_blocks=200),
    "no prefix cache": dict(enable_prefix_caching=False),
    "preempted": dict(block_size=8, num_blocks=24, enable_prefix_caching=False),
    "preempted, prefix cache": dict(block_size=8, num_blocks=24),
    "swapped": dict(block_size=8, num_blocks=24, swap_space_gib=0.01),
    "swapped, no prefix cache": dict(block_size=8, num_blocks=24, swap_space_gib=0.01, enable_prefix_caching=False),
    "two at a time": dict(max_num_seqs=2),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens(path, make_llm, expected, way):
    """Field cases 14, 35, 59: greedy and drawn, twice in a row, and in another order."""
    llm = make_llm(path, **WAYS[way])
    assert tokens_of(llm.generate(PROMPTS, PARAMS)) == expected
    assert tokens_of(llm.generate(PROMPTS[::-1], PARAMS[::-1])) == expected[::-1]
    llm.scheduler.check_integrity()
    stats = llm.stats()
    assert stats.blocks_used == 0 and stats.swapped == 0
    if "preempted" in way or "swapped" in way:
        assert stats.preempted > 0
    cached = "no prefix cache" not in way and way != "preempted"
    assert (stats.prefix_hit_rate > 0.4) == cached  # of the second run all full blocks, if they are still there


def test_swapping_does_not_recompute(path, make_llm, expected):
    llm = make_llm(path, **WAYS["swapped, no prefix cache"])
    moved, chunks = [], []
    swap_in, step = llm.kv_cache.swap_in, llm.runner.step
    llm.kv_cache.swap_in = lambda pairs: (moved.extend(pairs), swap_in(pairs))
    llm.runner.step = lambda batch: (chunks.extend(r.num_scheduled for r in batch), step(batch))[1]
    assert tokens_of(llm.generate(PROMPTS, PARAMS)) == expected
    assert tokens_of(llm.generate(PROMPTS[::-1], PARAMS[::-1])) == expected[::-1]
    prompts = sum(len(llm.tokenizer.encode(prompt)) for prompt in PROMPTS)
    assert moved and sum(chunks) == 2 * (prompts + sum(p.max_tokens - 1 for p in PARAMS))


@pytest.mark.parametrize("length", [31, 32, 33, 48])
def test_a_prompt_that_is_cached_whole(path, make_llm, length):
    """The last token alone is computed; the blocks that others share stay as they are, bit for bit."""
    llm, prompt = make_llm(path, block_size=16), [5 + i % 250 for i in range(length)]
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    first = llm.generate([prompt], params)
    full = [entry.block for entry in llm.blocks.prefix.entries.values()]
    before = llm.kv_cache.storage[:, full].clone()
    again = llm.generate([prompt], params)
    assert tokens_of(again) == tokens_of(first)
    assert again[0].num_cached_tokens == min(length // 16 * 16, length - 1)
    assert torch.equal(llm.kv_cache.storage[:, full], before)


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_choices_are_the_same_however_they_run(path, make_llm, num_blocks):
    """Field case 51: seeded choices differ, come again, and do not depend on who shares what."""
    params = SamplingParams(n=4, max_tokens=20, seed=5, ignore_eos=True)
    ways = [dict(), dict(max_num_seqs=2), dict(enable_prefix_caching=False, max_num_batched_tokens=16)]
    results = [tokens_of(make_llm(path, num_blocks=num_blocks, **way).generate(TEXT, params))[0] for way in ways]
    assert results[0] == results[1] == results[2]
    assert len({tuple(tokens) for tokens in results[0]}) == 4
    alone = make_llm(path).generate(TEXT, SamplingParams(max_tokens=20, seed=5, ignore_eos=True))
    assert tokens_of(alone)[0][0] == results[0][0]
    (greedy,) = make_llm(path).generate(TEXT, SamplingParams(n=2, max_tokens=20, temperature=0, ignore_eos=True))
    assert greedy.outputs[0].token_ids == greedy.outputs[1].token_ids


def test_a_choice_that_ends_early_does_not_stop_the_rest(path, make_llm):
    llm = make_llm(path)
    params = SamplingParams(n=3, max_tokens=20, seed=5, ignore_eos=True)
    full = [choice.token_ids for choice in llm.generate(TEXT, params)[0].outputs]
    stop = next(token for token in full[1] if token not in full[0] and token not in full[2])
    params = SamplingParams(n=3, max_tokens=20, seed=5, ignore_eos=True, stop_token_ids=[stop])
    (output,) = llm.generate(TEXT, params)
    assert [choice.finish_reason for choice in output.outputs] == ["length", "stop", "length"]
    assert [choice.token_ids for choice in output.outputs] == [
        full[0], full[1][: full[1].index(stop) + 1], full[2]
    ]  # fmt: skip
    assert llm.stats().blocks_used == 0


def test_fork_goes_on_from_the_same_pages(path, make_llm):
    """Greedy continuations are equal; drawn ones differ and share what came before, text included."""
    llm = make_llm(path)
    for temperature, distinct in ((0, 1), (1, 4)):
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=2, ignore_eos=True, logprobs=1)
        output = llm.add_request("a", TEXT, params)
        for _ in range(8):
            llm.step()
        used = llm.stats().blocks_used
        assert llm.fork("a", 3) is output and llm.stats().blocks_used == used
        while llm.has_unfinished():
            llm.step()
            llm.scheduler.check_integrity()
        tokens = [tuple(choice.token_ids) for choice in output.outputs]
        assert len(set(tokens)) == distinct and len({t[:8] for t in tokens}) == 1
        assert all(len(choice.logprobs) == 20 for choice in output.outputs)
        assert all(choice.text == llm.tokenizer.decode(choice.token_ids) for choice in output.outputs)


def test_prompt_logprobs_are_never_read_from_the_cache(path, make_llm, make_llama):
    """Field case 41: asked twice, equal, of full length, and those of the whole forward pass."""
    llm = make_llm(path, max_num_batched_tokens=16)
    prompt = llm.tokenizer.encode(TEXT)[:50]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, prompt_logprobs=2)
    plain = llm.generate([prompt], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    first, again = (llm.generate([prompt], params)[0] for _ in range(2))
    assert first.prompt_logprobs == again.prompt_logprobs and first.num_cached_tokens == again.num_cached_tokens == 0
    assert len(first.prompt_logprobs) == 50 and first.prompt_logprobs[0] is None
    assert tokens_of([first]) == tokens_of([again]) == tokens_of(plain)
    _, model = make_llama("reference")
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for position, found in enumerate(first.prompt_logprobs[1:]):
        best = logprobs[position].topk(2).indices.tolist()
        assert list(found)[0] == prompt[position + 1] and set(found) == {prompt[position + 1], *best}
        for token, value in found.items():
            assert value == pytest.approx(float(logprobs[position, token]), abs=1e-3)


def test_prompt_logprobs_survive_preemption(path, make_llm):
    llm, roomy = make_llm(path, block_size=8, num_blocks=12, max_num_batched_tokens=16), make_llm(path)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, prompt_logprobs=0)
    prompts = [TEXT[:40], TEXT[40:70]]
    outputs, wanted = llm.generate(prompts, params), roomy.generate(prompts, params)
    assert llm.stats().preempted > 0
    for output, other in zip(outputs, wanted, strict=True):
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for found, expected in zip(output.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert found == pytest.approx(expected, abs=1e-3)


def test_other_weights_find_nothing(path, make_llm):
    """Field case 42: changed in place, and the prefix cache reset."""
    llm = make_llm(path)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    first = llm.generate(TEXT, params)
    for layer in llm.runner.model.layers:
        layer.input_norm.neg_()
    llm.blocks.reset_prefix_cache()
    (second,) = llm.generate(TEXT, params)
    assert second.num_cached_tokens == 0 and tokens_of([second]) != tokens_of(first)
    llm.add_request("a", TEXT)
    llm.step()
    with pytest.raises(RuntimeError, match="while no sequence runs"):
        llm.blocks.reset_prefix_cache()
