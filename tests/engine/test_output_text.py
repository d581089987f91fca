"""Where an output ends: stop texts over token borders, the fewest tokens, and both through the engine."""

import pytest
import torch
from checkpoints import EOS, byte_tokenizer, token_ids_of
from scripted import one_hot, script_logits

from engine_min import SamplingParams
from engine_min.tokenizer import OutputText, Tokenizer


def run(text, tokens=None, **params):
    """Feeds the text's bytes; the deltas and the reason, and how many tokens were taken."""
    settings = {"max_tokens": 100} | params
    stream = OutputText(Tokenizer(byte_tokenizer(), None, "<s>", "</s>"), SamplingParams(**settings), frozenset([EOS]))
    deltas = []
    for token in token_ids_of(text) if tokens is None else tokens:
        delta, reason = stream.push(token)
        deltas.append(delta)
        if reason:
            return deltas, reason
    return deltas, None


@pytest.mark.parametrize(
    "text, stop, expected",
    [
        ("one STOP two", "STOP", "one "),
        ("one STOP two", ["two", "STOP"], "one "),
        ("one STO STOP", ["STOP"], "one STO "),
        ("aaab", "aab", "a"),  # the first try fails after two characters, which are the start of the second
        ("ababac", "abac", "ab"),
        ("STOP", "STOP", ""),
        ("a🙂b", "🙂", "a"),
        ("x</", ["</s>", "x</"], ""),
        ("one\n\ntwo", "\n\n", "one"),
    ],
)
def test_stop_text(text, stop, expected):
    deltas, reason = run(text, stop=stop)
    assert ("".join(deltas), reason) == (expected, "stop")


def test_what_may_begin_a_stop_text_waits_and_nothing_else_does():
    deltas, _ = run("a STOS STO", stop=["STOP", "x"])
    assert deltas == ["a", " ", "", "", "", "STO", "S ", "", "", ""]
    assert run("abc", stop="x")[0] == ["a", "b", "c"]


@pytest.mark.parametrize("end", [{"max_tokens": 6}, {}])
def test_what_waits_comes_out_at_the_end(end):
    tokens = [*token_ids_of("ab STO"), EOS]
    deltas, reason = run("", tokens=tokens, stop="STOP", **end)
    assert ("".join(deltas), reason) == ("ab STO", "length" if end else "stop")


def test_stop_text_in_the_last_token_allowed():
    assert run("abcd", stop="cd", max_tokens=4) == (["a", "b", "", ""], "stop")


@pytest.mark.parametrize("stop", [None, "\n"])
def test_min_tokens_for_stop_texts_and_end_tokens(stop):
    """Field case 57: four tokens, then the end may come."""
    newline, end = token_ids_of("\n")[0], EOS
    deltas, reason = run("", tokens=[newline] * 9, stop="\n", min_tokens=4)
    assert (deltas, reason) == (["\n"] * 4 + [""], "stop")
    deltas, reason = run("", tokens=[end] * 9, stop=stop, min_tokens=4)
    assert (len(deltas), reason) == (5, "stop")


# ---- Through the engine.


@pytest.fixture
def llm(make_llama, make_llm):
    return make_llm(make_llama()[0])


def say(llm, text):
    """Makes the model answer with the text and then its end token, whatever it is asked."""
    tokens = [*token_ids_of(text), EOS]
    script_logits(llm, lambda position, request: one_hot(tokens[min(request.num_generated, len(tokens) - 1)]))


def test_stop_text_through_the_engine(llm):
    say(llm, "first line\nsecond")
    (output,) = llm.generate("x", SamplingParams(max_tokens=50, temperature=0, stop=["e\ns"]))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("first lin", "stop")
    assert llm.tokenizer.decode(output.outputs[0].token_ids) == "first line\ns"
    assert llm.stats().blocks_used == 0 and not llm.has_unfinished()


def test_min_tokens_through_the_engine(llm):
    script_logits(llm, lambda position, request: one_hot(EOS) + one_hot(65) / 2)
    params = SamplingParams(max_tokens=9, temperature=0, min_tokens=4, logit_bias={EOS: 50.0})
    (output,) = llm.generate("x", params)
    assert output.outputs[0].token_ids == [65] * 4 + [EOS]
    assert output.outputs[0].finish_reason == "stop"
    params = SamplingParams(max_tokens=6, temperature=0, min_tokens=6, logit_bias={EOS: 50.0})
    (output,) = llm.generate("x", params)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([65] * 6, "length")


def test_logprobs_through_the_engine(llm):
    params = [SamplingParams(max_tokens=5, seed=3, ignore_eos=True, logprobs=count) for count in (None, 0, 4)]
    outputs = [output.outputs[0] for output in llm.generate(["same"] * 3, params)]
    assert outputs[0].logprobs is None
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
    assert [list(entry) for entry in outputs[1].logprobs] == [[token] for token in outputs[1].token_ids]
    assert all(len(entry) in (4, 5) for entry in outputs[2].logprobs)
    for one, four in zip(outputs[1].logprobs, outputs[2].logprobs, strict=True):
        assert one.items() <= four.items()


def test_penalties_through_the_engine(llm):
    """Every logit alike but one: with a penalty on what has been said, no token comes twice."""
    script_logits(llm, lambda position, request: torch.arange(288) / 1000)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, presence_penalty=2.0)
    (output,) = llm.generate("x", params)
    assert output.outputs[0].token_ids == list(range(287, 257, -1))


def test_ids_outside_the_vocabulary(llm):
    for params in ({"logit_bias": {288: 1.0}}, {"stop_token_ids": [-1]}):
        with pytest.raises(ValueError, match=f"{next(iter(params))} holds a token id .*outside"):
            llm.add_request("a", "x", SamplingParams(**params))
    assert not llm.has_unfinished()
