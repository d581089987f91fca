"""The engine as a whole on small random models: batches, ends, aborts, errors, preemption, statistics."""

import json

import pytest
import torch
from checkpoints import EOS, byte_tokenizer
from scripted import one_hot, script_logits

from engine_min import SamplingParams, StepError

PROMPTS = ["The sea.", "A", "Somewhat longer than the others, this one.", "ü🙂", "The sea."]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def llm(make_llama, make_llm):
    return make_llm(make_llama()[0])


def test_batch_equals_each_alone(llm):
    """Field case 59: prompts twice in a batch, batches of different sizes one after the other, order kept."""
    alone = [tokens_of(llm.generate(prompt, GREEDY))[0] for prompt in PROMPTS]
    assert alone[0] == alone[4]
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == alone
    assert tokens_of(llm.generate(PROMPTS[2:], GREEDY)) == alone[2:]
    assert tokens_of(llm.generate(PROMPTS[::-1], GREEDY)) == alone[::-1]
    assert len({tuple(tokens) for tokens in alone}) == 4


def test_ids_and_text_are_the_same_prompt(llm):
    ids = llm.tokenizer.encode(PROMPTS[2])
    outputs = llm.generate([PROMPTS[2], ids], GREEDY)
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids == ids
    assert tokens_of(outputs)[0] == tokens_of(outputs)[1] == tokens_of(llm.generate(ids, GREEDY))[0]


def test_text_is_the_tokens_decoded_and_the_deltas_joined(llm):
    output = llm.add_request("a", "Hi", GREEDY)
    deltas = []
    while llm.has_unfinished():
        deltas += [o.outputs[0].new_text for o in llm.step()]
    assert "".join(deltas) == output.outputs[0].text
    assert llm.tokenizer.decode(output.outputs[0].token_ids) == output.outputs[0].text
    assert output.finished and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("num_blocks", (9, 13))
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_preemption_changes_no_token(make_llama, make_llm, num_blocks, temperature):
    """Greedy, and drawn with seeds (field case 35): the draws are keyed by position, so they do not start again."""
    path, _ = make_llama()
    params = [
        SamplingParams(max_tokens=30, temperature=temperature, seed=i, ignore_eos=True) for i in range(len(PROMPTS))
    ]
    roomy, tight = make_llm(path, block_size=8), make_llm(path, block_size=8, num_blocks=num_blocks)
    expected = tokens_of(roomy.generate(PROMPTS, params))
    assert roomy.stats().preempted == 0
    texts, tokens = {}, {}
    for i, prompt in enumerate(PROMPTS):
        tokens[str(i)] = tight.add_request(str(i), prompt, params[i]).outputs[0]
    while tight.has_unfinished():
        for output in tight.step():
            texts[output.request_id] = texts.get(output.request_id, "") + output.outputs[0].new_text
        tight.blocks.check_integrity()
    assert [tokens[str(i)].token_ids for i in range(len(PROMPTS))] == expected
    assert tight.stats().preempted > 0 and tight.stats().blocks_used == 0
    assert texts == {name: output.text for name, output in tokens.items()}  # field case 36: the stream goes on


def test_scripted_draws_do_not_depend_on_preemption_or_company(make_llama, make_llm):
    """Flat logits, so that numerics cannot differ: every token is the seed's own."""
    path, _ = make_llama()
    params = SamplingParams(max_tokens=20, seed=7, ignore_eos=True)
    results = []
    for num_blocks, company in ((64, 0), (64, 3), (6, 1)):
        llm = make_llm(path, block_size=8, num_blocks=num_blocks)
        script_logits(llm, lambda position, request: torch.zeros(288))
        for i in range(company):
            llm.add_request(f"other{i}", "abcdefgh" * 2, SamplingParams(max_tokens=20, seed=i, ignore_eos=True))
        output = llm.add_request("mine", "Seed", params)
        while llm.has_unfinished():
            llm.step()
        results.append(output.outputs[0].token_ids)
    assert llm.stats().preempted > 0
    assert results[0] == results[1] == results[2]
    assert len(set(results[0])) > 10


def test_same_engine_seed_same_draws(make_llama, make_llm):
    path, _ = make_llama()
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    runs = [tokens_of(make_llm(path, seed=seed).generate(["x", "x"], params)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]  # without a seed of its own each request gets another


# ---- Ends (field cases 48 and 49).


@pytest.mark.parametrize("eos", (EOS, 106))
def test_stops_on_every_end_token(make_llama, make_llm, eos):
    path, _ = make_llama()
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106]}))
    llm = make_llm(path)
    assert llm.model_config.eos_token_ids == {1, 106, EOS}
    script_logits(llm, lambda position, request: one_hot(eos if position == 6 else 65))
    for ignore, count, reason in ((False, 3, "stop"), (True, 8, "length")):
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=ignore)
        (output,) = llm.generate([[1, 2, 3, 4]], params)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (count, reason)
        assert output.outputs[0].token_ids[2] == eos


def test_an_end_token_outside_the_vocabulary_is_none(make_llama, make_llm):
    """As -1 where a model has none; masked by min_tokens, it would fail the step of everybody."""
    path, _ = make_llama()
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 288, 5]}))
    llm = make_llm(path)
    script_logits(llm, lambda position, request: one_hot(287))
    (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=3, min_tokens=2, temperature=0))
    assert output.outputs[0].token_ids == [287] * 3
    assert llm.model_config.eos_token_ids == {EOS, 5}


def test_stop_token_ids_count_even_when_eos_is_ignored(llm):
    script_logits(llm, lambda position, request: one_hot(position))
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, stop_token_ids=[70, 7])
    (output,) = llm.generate([[1, 2, 3, 4]], params)
    assert output.outputs[0].token_ids == [4, 5, 6, 7]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text == llm.tokenizer.decode([4, 5, 6])  # the stop token is no text


def test_head_wider_than_the_tokenizer(llm):
    """Ids 258 to 287 exist for the model alone: they are empty text and nothing breaks."""
    script_logits(llm, lambda position, request: one_hot(280 if position % 2 else byte_tokenizer().token_to_id("a")))
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0))
    assert 280 in output.outputs[0].token_ids
    assert output.outputs[0].text == "aa"


# ---- Aborts and errors (field cases 32, 39, 54, 55).


def test_abort_at_any_moment(make_llama, make_llm):
    llm = make_llm(make_llama()[0], max_num_seqs=2, max_num_batched_tokens=16, block_size=8)
    outputs = {
        name: llm.add_request(name, "x" * length, GREEDY) for name, length in zip("abcd", (5, 40, 5, 5), strict=True)
    }
    llm.step()  # a decodes, b is in the middle of its prompt, c and d wait
    for name in "bd":
        assert llm.abort(name)
        llm.blocks.check_integrity()
    assert not llm.abort("b") and not llm.abort("never")
    while llm.has_unfinished():
        llm.step()
    assert not llm.abort("a")
    reasons = {name: output.outputs[0].finish_reason for name, output in outputs.items()}
    assert reasons == {"a": "length", "b": "abort", "c": "length", "d": "abort"}
    assert tokens_of([outputs["a"]]) == tokens_of(llm.generate("x" * 5, GREEDY)) == tokens_of([outputs["c"]])
    assert llm.stats().blocks_used == 0 and llm.has_unfinished() is False


def test_refuses_what_can_never_run(make_llama, make_llm):
    llm = make_llm(make_llama()[0], max_model_len=100, block_size=8, num_blocks=10)
    cases = [
        ([], 1, "the prompt is empty"),
        ([1] * 99, 2, "99 prompt tokens and max_tokens 2 make 101, more than max_model_len 100"),
        ([1] * 80, 2, "80 prompt tokens and max_tokens 2 need 11 KV blocks, the pool has 10"),
        ([1, 288], 1, r"outside \[0, 288\)"),
        ([1, -1], 1, r"outside \[0, 288\)"),
        ([1.5, 2], 1, r"outside \[0, 288\)"),
        (["a", 2], 1, r"outside \[0, 288\)"),
    ]
    running = llm.add_request("running", "abc", GREEDY)
    for prompt, max_tokens, message in cases:
        with pytest.raises(ValueError, match=message):
            llm.add_request("refused", prompt, SamplingParams(max_tokens=max_tokens))
    with pytest.raises(ValueError, match="'running' is already running"):
        llm.add_request("running", "abc")
    with pytest.raises(RuntimeError, match="needs an idle engine"):
        llm.generate("abc")
    while llm.has_unfinished():
        llm.step()
    assert running.outputs[0].finish_reason == "length"
    (output,) = llm.generate([[1] * 79], SamplingParams(max_tokens=2, ignore_eos=True))  # fits to the last slot
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    "options",
    [{"stop": [1]}, {"stop": b"a"}, {"stop": [b"a"]}, {"seed": 1.5}, {"seed": "7"}, {"logprobs": 1.5},
     {"logprobs": True}, {"prompt_logprobs": 2.5}, {"max_tokens": 2.5}, {"n": 1.5}, {"top_k": 0.5},
     {"stop_token_ids": [1.5]}, {"logit_bias": {"a": 1.0}}, {"min_tokens": 0.5}, {"stop": 5}, {"temperature": "a"},
     {"top_p": None}, {"logit_bias": {1: "a"}}],
    ids=str,
)  # fmt: skip
def test_settings_of_another_type_are_refused(options):
    (name,) = options
    with pytest.raises(
        ValueError, match=f"^{name} is .*, expected (whole numbers|texts that are not empty|numbers |in )"
    ):
        SamplingParams(**options)


def test_a_salt_that_is_no_text_is_refused(llm):
    with pytest.raises(ValueError, match=r"cache_salt is \[5\], expected a text"):
        llm.add_request("salted", "abc", GREEDY, [5])
    assert not llm.has_unfinished()


def test_a_cache_of_another_dtype_than_the_model_is_refused(make_llama, make_llm):
    with pytest.raises(ValueError, match=r"kv_cache_dtype is 'bfloat16', expected the model's dtype \(float32\)"):
        make_llm(make_llama()[0], kv_cache_dtype="bfloat16")


def test_a_bad_prompt_in_a_batch_leaves_the_engine_idle(llm):
    with pytest.raises(ValueError, match="is empty"):
        llm.generate(["fine", []], GREEDY)
    assert not llm.has_unfinished()


@pytest.mark.parametrize("value", (float("nan"), float("-inf")))
def test_unusable_logits_fail_loudly_and_alone(llm, value):
    def row(position, request):
        return torch.full((288,), value) if request.request_id == "bad" and position == 5 else one_hot(65)

    script_logits(llm, row)
    good, bad = (llm.add_request(name, [1, 2, 3], GREEDY).outputs[0] for name in ("good", "bad"))
    with pytest.raises(StepError, match="without a finite maximum .* aborted bad") as caught:
        while llm.has_unfinished():
            llm.step()
    assert [output.request_id for output in caught.value.failed] == ["bad"]
    assert [output.request_id for output in caught.value.outputs] == ["good"]
    while llm.has_unfinished():
        llm.step()
    assert (bad.finish_reason, bad.token_ids) == ("abort", [65, 65])
    assert (good.finish_reason, len(good.token_ids)) == ("length", 12)


def test_a_failed_step_fails_its_own_requests_only(make_llama, make_llm):
    llm = make_llm(make_llama()[0], max_num_seqs=1)
    first, second = llm.add_request("a", "abc", GREEDY), llm.add_request("b", "abc", GREEDY)
    model, llm.runner.model = llm.runner.model, None
    with pytest.raises(StepError, match="a step failed .* aborted a") as caught:
        llm.step()
    assert (caught.value.failed, caught.value.outputs) == ([first], [])
    assert isinstance(caught.value.__cause__, TypeError)
    llm.runner.model = model
    while llm.has_unfinished():
        llm.step()
    assert (first.outputs[0].finish_reason, second.outputs[0].finish_reason) == ("abort", "length")
    llm.blocks.check_integrity()
    assert llm.stats().blocks_used == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "int8"}, "dtype is 'int8', expected one of"),
        ({"device": "tpu"}, "device is 'tpu', expected one of"),
        ({"attention": "magic"}, "attention is 'magic', expected one of"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 300}, "max_num_batched_tokens is 256, expected at least max_num_seqs"),
    ],
)
def test_bad_options(make_llm, options, message):
    with pytest.raises(ValueError, match=message):
        make_llm("anywhere", **options)


# ---- What cannot be seen must not matter, and what is counted must be right.


def test_stale_cache_contents_do_not_matter(llm):
    """Blocks come uninitialised and are reused uncleaned; here they are full of NaN."""
    expected = tokens_of(llm.generate(PROMPTS, GREEDY))
    llm.blocks.reset_prefix_cache()
    llm.kv_cache.storage.fill_(float("nan"))
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected


def test_stale_metadata_does_not_matter(llm):
    """The fixed buffers keep what longer batches left behind."""
    expected = tokens_of(llm.generate("Short", GREEDY))
    llm.generate(["x" * 200] * 8, GREEDY)
    for name in ("_token_ids", "_positions", "_slots", "_seq_lens", "_cu_seqlens", "_block_table"):
        getattr(llm.runner, name).host.fill(0 if name == "_cu_seqlens" else 2**30)
    assert tokens_of(llm.generate("Short", GREEDY)) == expected


def test_statistics(make_llama, make_llm):
    llm = make_llm(make_llama()[0], block_size=8)
    llm.generate([[1] * 8, [2] * 3], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    stats = llm.stats()
    assert (stats.steps, stats.tokens_in, stats.tokens_out) == (3, 11, 6)
    assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_free, stats.blocks_peak) == (0, 0, 0, 64, 3)
    held = (2 + 3 + 3) * 8  # blocks of the two, step by step: 1+1, 2+1, 2+1
    filled = (8 + 3) + (9 + 4) + (10 + 5)
    assert stats.fragmentation == pytest.approx(1 - filled / held)
