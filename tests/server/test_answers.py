"""What clients get: whole and streamed, completions and chats, usage, logprobs."""

import math

import pytest
import torch
from checkpoints import EOS, token_ids_of
from scripted import one_hot

from engine_min import SamplingParams


def complete(client, prompt="Hello", stream=False, **options):
    return client.completions.create(model="tiny", prompt=prompt, stream=stream, **options)


def chat(client, content="Hi", stream=False, **options):
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="tiny", messages=messages, stream=stream, **options)


def joined(chunks, field=lambda choice: choice.text):
    """Text and finish reason per choice of a stream."""
    texts, reasons = {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (field(choice) or "")
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return [(texts[i], reasons[i]) for i in sorted(texts)]


def delta(choice):
    return choice.delta.content


def test_completion_is_what_the_engine_says(client, make_llm):
    answer = complete(client, temperature=0, max_tokens=12, extra_body={"ignore_eos": True})
    (expected,) = make_llm().generate("Hello", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert answer.choices[0].text == expected.outputs[0].text
    assert (answer.choices[0].finish_reason, answer.object, answer.model) == ("length", "text_completion", "tiny")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 12, 17)


def test_chat(server, client):
    server.say("good day")
    answer = chat(client)
    assert answer.object == "chat.completion"
    message = answer.choices[0].message
    assert (message.role, message.content, answer.choices[0].finish_reason) == ("assistant", "good day", "stop")
    assert answer.usage.completion_tokens == 9


def test_chat_prompt_has_one_beginning_token_and_parts_become_lines(server, client):
    """Field case 56."""
    seen = []
    server.script(lambda position, request: seen.append(request.prompt_token_ids) or one_hot(EOS))
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None},
        ],
    )
    assert seen[0] == token_ids_of("<s>system: S\nuser: a\nb\nassistant: \nanswer: ")
    assert seen[0].count(256) == 1


@pytest.mark.parametrize("stop_early", [True, False])
def test_streams_equal_the_whole_answer(server, client, stop_early):
    server.say("a🙂世ď STOP and on")
    options = {"stop": "STOP"} if stop_early else {}
    expected = ("a🙂世ď " if stop_early else "a🙂世ď STOP and on", "stop")
    whole = complete(client, max_tokens=40, **options).choices[0]
    assert (whole.text, whole.finish_reason) == expected
    assert joined(complete(client, stream=True, max_tokens=40, **options)) == [expected]
    whole = chat(client, **options).choices[0]
    assert (whole.message.content, whole.finish_reason) == expected
    chunks = list(chat(client, stream=True, **options))
    assert joined(chunks, delta) == [expected]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 5 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("text", ["a🙂世ď", "A 世", "🙂"])
def test_no_broken_characters_between_tokens(server, client, text):
    """Field case 50."""
    server.say(text)
    deltas = [chunk.choices[0].delta.content or "" for chunk in chat(client, stream=True)]
    assert "".join(deltas) == text and not any("\ufffd" in part for part in deltas)


def test_cut_off_character_is_the_same_in_both_modes(server, client):
    server.say("a🙂")
    whole = complete(client, max_tokens=3).choices[0]
    assert [(whole.text, whole.finish_reason)] == joined(complete(client, stream=True, max_tokens=3))
    assert whole.text in ("a", "a\ufffd") and whole.finish_reason == "length"
    server.say([token_ids_of("🙂")[-1], EOS])  # a lone 0x82
    assert complete(client).choices[0].text == "\ufffd"


def test_head_wider_than_the_tokenizer(server, client):
    """Field case 49: ids that the tokenizer does not know are empty text, in logprobs too."""
    server.say([280, *token_ids_of("x"), 281, EOS])
    answer = chat(client, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "x"
    assert [entry.token for entry in answer.choices[0].logprobs.content] == ["", "x", "", "</s>"]
    assert [entry.bytes for entry in answer.choices[0].logprobs.content][:2] == [[], [120]]


def test_several_prompts_keep_their_order(server, client):
    prompts = ["abc", "Hello there", "abc", "z" * 40]
    options = dict(temperature=0, max_tokens=10, extra_body={"ignore_eos": True})
    alone = [complete(client, prompt, **options).choices[0].text for prompt in prompts]
    answer = complete(client, prompts, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == alone
    assert [text for text, _ in joined(complete(client, prompts, stream=True, **options))] == alone
    assert answer.usage.prompt_tokens == 3 + 11 + 3 + 40 and answer.usage.completion_tokens == 40
    ids = [token_ids_of(prompt) for prompt in prompts]
    assert [choice.text for choice in complete(client, ids, **options).choices] == alone
    assert complete(client, ids[1], **options).choices[0].text == alone[1]


def test_echo(server, client):
    server.say("!")
    assert complete(client, echo=True).choices[0].text == "Hello!"
    assert complete(client, token_ids_of("Hello"), echo=True).choices[0].text == "Hello!"
    assert joined(complete(client, ["one", "two"], echo=True, stream=True)) == [("one!", "stop"), ("two!", "stop")]


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_echo_with_logprobs(make_llm, client, max_tokens):
    """Field case 41: twice the same, though the second finds the prompt cached; 20 tokens, nothing for the first."""
    prompt = "twenty bytes of text"
    options = dict(echo=True, logprobs=3, max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True})
    first, second = (complete(client, prompt, **options) for _ in range(2))
    (expected,) = make_llm().generate(prompt, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    for answer in (first, second):
        choice, found = answer.choices[0], answer.choices[0].logprobs
        shown = expected.outputs[0].token_ids[:max_tokens]
        assert choice.text.startswith(prompt) and choice.finish_reason == "length"
        assert answer.usage.completion_tokens == max_tokens and len(found.tokens) == 20 + max_tokens
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert all(value < 0 and len(top) in (3, 4) for value, top in
                   zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True))  # fmt: skip
        assert found.text_offset[:20] == list(range(20)) and len(shown) == max_tokens
    assert first.choices[0].text == second.choices[0].text
    assert first.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        second.choices[0].logprobs.token_logprobs[1:], abs=1e-5
    )


# ---- Several choices (field case 51).


def test_choices(server, client):
    """Flat logits: four different texts, the same four again, in order, and in a stream."""
    server.script(lambda position, request: torch.zeros(288))
    options = dict(n=4, seed=5, temperature=1.0, max_tokens=20, extra_body={"ignore_eos": True})
    texts = [choice.text for choice in complete(client, **options).choices]
    assert len(set(texts)) == 4
    assert [choice.text for choice in complete(client, **options).choices] == texts
    assert [text for text, _ in joined(complete(client, stream=True, **options))] == texts
    greedy = complete(client, **(options | {"temperature": 0, "n": 2}))
    assert greedy.choices[0].text == greedy.choices[1].text
    assert (greedy.usage.prompt_tokens, greedy.usage.completion_tokens) == (5, 40)


def test_a_choice_that_ends_early_stops_no_other(server, client):
    server.script(lambda position, request: one_hot(EOS if request.index == 1 and position > 6 else 65))
    for answer in (chat(client, n=3, max_tokens=9), complete(client, n=3, max_tokens=9)):
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "stop", "length"]
    chunks = list(complete(client, ["Hello", "again"], n=3, max_tokens=9, stream=True,
                           stream_options={"include_usage": True}))  # fmt: skip
    assert [reason for _, reason in joined(chunks)] == ["length", "stop", "length"] * 2
    assert chunks[-1].usage.prompt_tokens == 10  # counted once, however many choices


def test_cached_tokens_are_told(client):
    prompt = "a prompt of some length that fills a block or two"
    first, second = (complete(client, prompt, max_tokens=2).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == len(prompt) // 16 * 16


def test_same_seed_same_answer(server, client):
    options = dict(temperature=1.0, max_tokens=20, extra_body={"ignore_eos": True})
    texts = [complete(client, seed=seed, **options).choices[0].text for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_null_is_as_good_as_absent(client):
    nothing = dict.fromkeys(("n", "stop", "logprobs", "max_tokens", "suffix", "seed", "logit_bias", "stream_options"))
    answer = complete(client, temperature=0, extra_body=nothing | {"ignore_eos": True})
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].logprobs is None


def test_chat_may_fill_the_context(server, client):
    """max_tokens absent: field case 53."""
    answer = chat(client, "x" * 200, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 256 and answer.choices[0].finish_reason == "length"
    assert chat(client, max_completion_tokens=3, extra_body={"ignore_eos": True}).usage.completion_tokens == 3


def test_parameters_reach_the_engine(server, client):
    extra = {"top_k": 5, "min_p": 0.1, "min_tokens": 2, "repetition_penalty": 1.5, "stop_token_ids": [7]}
    seen = []
    server.script(lambda position, request: seen.append(request.params) or one_hot(65))
    complete(client, n=1, max_tokens=3, temperature=0.5, top_p=0.9, seed=11, stop=["x", "y"], presence_penalty=0.25,
             frequency_penalty=-0.5, logit_bias={"65": 7}, logprobs=2, extra_body=extra, user="somebody")  # fmt: skip
    assert seen[0] == SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=11, stop=["x", "y"], stop_token_ids=[7],
        min_tokens=2, logprobs=2, repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=-0.5,
        logit_bias={65: 7},
    )  # fmt: skip


# ---- Usage in streams (field case 58).


@pytest.mark.parametrize("options, expected", [({"include_usage": True}, 1), ({"include_usage": False}, 0), ({}, 0)])
def test_usage_in_streams(server, client, options, expected):
    server.say("abc")
    for chunks in (chat(client, stream=True, stream_options=options),
                   complete(client, ["Hello", "You"], stream=True, stream_options=options)):  # fmt: skip
        chunks = list(chunks)
        with_usage = [chunk for chunk in chunks if chunk.usage is not None]
        assert len(with_usage) == expected
        if expected:
            assert chunks[-1].choices == [] and chunks[-1] is with_usage[0]
    if expected:
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (8, 8)


def test_stream_ends_with_done(server, raw):
    server.say("ab")
    status, body = raw("POST", "/v1/completions", {"prompt": "x", "stream": True})
    events = body.decode().strip().split("\n\n")
    assert status == 200 and events[-1] == "data: [DONE]" and all(event.startswith("data: {") for event in events[:-1])


# ---- Logprobs (field case 52).


def test_completion_logprobs(server, client):
    server.say("a🙂b")
    assert complete(client).choices[0].logprobs is None
    none = complete(client, logprobs=0).choices[0].logprobs
    assert none.tokens == ["a", *(f"bytes:\\x{byte:02x}" for byte in "🙂".encode()), "b", "</s>"]
    assert none.top_logprobs is None and none.text_offset == [0, 1, 1, 1, 1, 2, 3]
    two = complete(client, logprobs=2).choices[0].logprobs
    assert two.token_logprobs == none.token_logprobs
    assert all(len(top) == 2 and max(top.values()) == value for top, value in
               zip(two.top_logprobs, two.token_logprobs, strict=True))  # fmt: skip
    assert two.token_logprobs[0] == pytest.approx(-math.log1p(287 * math.exp(-50.0)), abs=1e-6)


@pytest.mark.parametrize("top", [0, 1, 20, None])
def test_chat_logprobs(server, client, top):
    server.say("a🙂")
    options = {} if top is None else {"top_logprobs": top}
    content = chat(client, logprobs=True, **options).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [top or 0] * 6
    assert b"".join(bytes(entry.bytes) for entry in content) == "a🙂</s>".encode()
    assert all(entry.token in (other.token for other in entry.top_logprobs) for entry in content if top)
    streamed = [
        entry
        for chunk in chat(client, stream=True, logprobs=True, **options)
        for choice in chunk.choices
        for entry in (choice.logprobs.content if choice.logprobs else [])
    ]
    assert [(entry.token, entry.logprob) for entry in streamed] == [(entry.token, entry.logprob) for entry in content]


def test_minus_infinity_is_valid_json(server, client):
    row = one_hot(65)
    row[66:] = -math.inf
    server.script(lambda position, request: row)
    top = complete(client, logprobs=20, max_tokens=1, extra_body={"top_k": 1}).choices[0].logprobs.top_logprobs[0]
    assert len(top) == 20
    banned = chat(client, logprobs=True, max_tokens=1, logit_bias={"65": -100, "70": 100})  # -inf stays -inf
    assert banned.choices[0].logprobs.content[0].logprob > -9999


# ---- The rest of the routes.


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").max_model_len == 256


def test_health(raw):
    assert raw("GET", "/health") == (200, b'{"status":"ok"}')


def test_metrics(server, client, raw):
    from prometheus_client.parser import text_string_to_metric_families

    def read():
        families = text_string_to_metric_families(raw("GET", "/metrics")[1].decode())
        return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}

    before = read()
    server.say("abcdef")
    complete(client, "12345")
    complete(client, "12345", max_tokens=2)
    after = read()

    def gained(name, *labels):
        key = (f"pagedkern_{name}", *labels)
        return after[key] - before.get(key, 0)

    assert (gained("prompt_tokens_total"), gained("generated_tokens_total")) == (10, 9)
    assert (gained("requests_finished_total", "stop"), gained("requests_finished_total", "length")) == (1, 1)
    assert (gained("time_to_first_token_seconds_count"), gained("inter_token_seconds_count")) == (2, 7)
    assert gained("request_seconds_count") == 2 and gained("request_seconds_sum") > 0
    assert gained("http_responses_total", "/v1/completions", "200") == 2
    for name in ("kv_usage_ratio", "kv_blocks_used", "requests_running", "requests_waiting"):
        assert after["pagedkern_" + name,] == 0
    assert after["pagedkern_kv_blocks_free",] == 64
    assert after["pagedkern_preemptions_total",] == 0 and ("pagedkern_prefix_cache_hit_ratio",) in after
