"""What clients get wrong costs them an error body and nobody else anything; what they abandon is aborted."""

import json
import socket
import threading
import time

import openai
import pytest
import torch
from running import request
from scripted import one_hot

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "path, body, status, param, part",
    [
        (COMPLETIONS, b"{", 400, None, "not valid JSON"),
        (COMPLETIONS, b"\xff\xfe{}", 400, None, "not valid JSON"),
        (COMPLETIONS, b"[" * 100000, 400, None, "not valid JSON"),
        (COMPLETIONS, b'{"prompt": "a", "st\\ud800": 1}', 400, None, "half of a surrogate pair"),
        (COMPLETIONS, [1], 400, None, "not a JSON object"),
        (COMPLETIONS, {}, 400, "prompt", "missing or empty"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt", "missing or empty"),
        (COMPLETIONS, {"prompt": ""}, 400, None, "the prompt is empty"),
        (COMPLETIONS, {"prompt": [[]]}, 400, None, "the prompt is empty"),
        (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt", "not text, token ids"),
        (COMPLETIONS, {"prompt": [1, True]}, 400, "prompt", "not text, token ids"),
        (COMPLETIONS, {"prompt": [1.5]}, 400, "prompt", "not text, token ids"),
        (COMPLETIONS, {"prompt": [288]}, 400, None, "outside [0, 288)"),
        (COMPLETIONS, {"prompt": ["a", [-1]]}, 400, None, "outside [0, 288)"),
        (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt", 'prompt is {"a": 1}, expected text or a list'),
        (COMPLETIONS, {"prompt": "a", "temprature": 1}, 400, "temprature", "unrecognized request argument"),
        (COMPLETIONS, {"prompt": "a", "messages": []}, 400, "messages", "unrecognized request argument"),
        (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "model", "does not exist"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "max_tokens is 0"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0, "echo": True, "stream": True}, 400, "max_tokens", "is 0"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1, "echo": True, "stream": True}, 400, "echo", "in a stream"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens", "max_tokens is -1"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 10**6}, 400, "prompt", "1000000 to generate do not fit"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 10**400}, 400, "prompt", "do not fit"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens", "max_tokens is 1.5, expected an integer"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens", 'is "5", expected an integer'),
        (COMPLETIONS, {"prompt": "a", "n": True}, 400, "n", "n is true, expected an integer"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "n", "n is 0"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, 400, "n", "129 choices"),
        (COMPLETIONS, {"prompt": ["a"] * 2, "n": 65}, 400, "n", "130 choices"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, 400, "temperature", "temperature is -1"),
        (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400, "temperature", "temperature is nan"),
        (COMPLETIONS, {"prompt": "a", "temperature": 10**400}, 400, "temperature", "temperature is 1000"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, 400, "temperature", 'is "hot", expected a number'),
        (COMPLETIONS, {"prompt": "a", "top_p": 2}, 400, "top_p", "top_p is 2"),
        (COMPLETIONS, {"prompt": "a", "top_k": -5}, 400, "top_k", "top_k is -5"),
        (COMPLETIONS, {"prompt": "a", "stop": [1]}, 400, "stop", "not text"),
        (COMPLETIONS, {"prompt": "a", "stop": ""}, 400, "stop", "not empty"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": ["a"]}, 400, "stop_token_ids", "not a token id"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [999]}, 400, "stop_token_ids", "outside [0, 288)"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "expected id: number"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": "a"}}, 400, "logit_bias", "expected id: number"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 101}}, 400, "logit_bias", "in [-100, 100]"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"999": 1}}, 400, "logit_bias", "outside [0, 288)"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 17}, 400, "min_tokens", "min_tokens is 17"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", "max_tokens (8)"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "logprobs", "logprobs is 21"),
        (COMPLETIONS, {"prompt": "a", "logprobs": -1}, 400, "logprobs", "logprobs is -1"),
        (COMPLETIONS, {"prompt": "a", "logprobs": True}, 400, "logprobs", "logprobs is true"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, 400, "best_of", "not supported"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix", "not supported"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, 400, "stream_options", "stream to be true"),
        (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}}, 400, "stream_options",
         "include_usage"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, "stream", "expected true or false"),
        (CHAT, {}, 400, "messages", "missing or empty"),
        (CHAT, {"messages": []}, 400, "messages", "missing or empty"),
        (CHAT, {"messages": ["hi"]}, 400, "messages", "without a role"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "not text"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages", "not text"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "not text"),
        (CHAT, {"messages": [{"role": "forbidden", "content": "x"}]}, 400, "messages", "no such role"),
        (CHAT, {"messages": MESSAGES, "logprobs": 1}, 400, "logprobs", "expected true or false"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 1}, 400, "top_logprobs", "needs logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": False, "top_logprobs": 1}, 400, "top_logprobs", "needs logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "in [0, 20]"),
        (CHAT, {"messages": MESSAGES, "tools": [{}]}, 400, "tools", "not supported"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}, 400, "response_format", "text"),
        (CHAT, {"messages": MESSAGES, "modalities": ["audio"]}, 400, "modalities", "text"),
        (CHAT, {"messages": MESSAGES, "min_tokens": 300}, 400, "min_tokens", "min_tokens is 300"),
        ("/v1/nowhere", {}, 404, None, "Not Found"),
        ("/v1/models/other", None, 404, "model", "does not exist"),
        ("/v1/models", {}, 405, None, "Method Not Allowed"),
    ],
)  # fmt: skip
def test_error_bodies(server, raw, path, body, status, param, part):
    got, answer = raw("GET" if body is None else "POST", path, body)
    error = json.loads(answer)["error"]
    assert (got, error["param"]) == (status, param) and part in error["message"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] != "server_error"
    server.say("still here")
    assert json.loads(raw("POST", COMPLETIONS, {"prompt": "x"})[1])["choices"][0]["text"] == "still here"


def test_the_client_sees_them_as_its_own_exceptions(client):
    with pytest.raises(openai.BadRequestError, match="top_p is 5") as error:
        client.completions.create(model="tiny", prompt="x", top_p=5)
    assert error.value.param == "top_p" and error.value.code is None
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model="tiny", prompt="x", top_p=5, stream=True)


@pytest.mark.parametrize("length, max_tokens, fits", [(254, 2, True), (255, 1, True), (255, 2, False), (256, 1, False),
                                                      (257, 1, False), (257, None, False)])  # fmt: skip
def test_prompts_at_the_limit(client, length, max_tokens, fits):
    """Field case 54: max_model_len is 256."""
    options = dict(model="tiny", prompt=[65] * length, max_tokens=max_tokens, extra_body={"ignore_eos": True})
    if fits:
        assert client.completions.create(**options).usage.completion_tokens == max_tokens
        return
    with pytest.raises(openai.BadRequestError, match=f"{length} prompt tokens .*do not fit .* 256") as error:
        client.completions.create(**options)
    assert error.value.code == "context_length_exceeded"


def test_one_bad_prompt_of_several_starts_none(server, client):
    with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
        client.completions.create(model="tiny", prompt=["a", "b", ""])
    assert not server.llm.has_unfinished()


def test_body_too_large(run_server):
    with run_server(limits={"max_body_bytes": 1000}) as server:
        status, body = request(server, "POST", COMPLETIONS, {"prompt": "x" * 2000})
        assert status == 413 and "larger than 1000 bytes" in json.loads(body)["error"]["message"]
        assert request(server, "POST", COMPLETIONS, {"prompt": "x", "max_tokens": 1})[0] == 200


def test_queue_full(run_server):
    with run_server(limits={"max_waiting": 1}, max_num_seqs=1, max_num_batched_tokens=64) as server:
        server.script(slowly)
        streams = [server.client.completions.create(model="tiny", prompt="x", stream=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="1 requests are waiting already"):
            server.client.completions.create(model="tiny", prompt="x")
        assert [len(list(stream)) > 1 for stream in streams] == [True, True]


def slowly(position, request):
    time.sleep(0.01)
    return one_hot(65)


# ---- Clients that go.


def cut(server, path, body, after):
    """Sends a request and closes the connection: at once, or after the first bytes of the answer."""
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        if after == "first bytes":
            assert connection.recv(100)


def test_a_client_that_goes_before_it_has_asked(server, client, raw):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        time.sleep(0.05)
    time.sleep(0.05)
    assert b'path="/v1/completions",status="499"' in raw("GET", "/metrics")[1]
    assert client.completions.create(model="tiny", prompt="\U0001f642", max_tokens=1).usage.prompt_tokens == 4


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path, prompt", [(COMPLETIONS, {"prompt": ["x"] * 3}), (CHAT, {"messages": MESSAGES})])
def test_a_lost_client_aborts_its_request(server, client, path, prompt, stream):
    server.script(slowly)
    before = server.llm.stats().tokens_out
    cut(server, path, prompt | {"max_tokens": 200, "stream": stream, "ignore_eos": True},
        "first bytes" if stream else "at once")  # fmt: skip
    time.sleep(0.05)
    server.wait_idle()
    assert server.llm.stats().tokens_out - before < 200
    assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices[0].finish_reason == "length"


def test_a_client_that_does_not_read_holds_nobody_up(server, client):
    """Its answer is larger than the buffers between; the others go on."""
    server.script(lambda position, request: one_hot(65))
    body = {"prompt": ["x"] * 8, "max_tokens": 200, "stream": True, "ignore_eos": True, "logprobs": 20}
    raw = json.dumps(body).encode()
    with socket.socket() as sleeper:
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sleeper.connect(("127.0.0.1", server.port))
        sleeper.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
        answer = client.completions.create(model="tiny", prompt="x", max_tokens=5, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 5
        server.wait_idle()


# ---- Failures of the engine.


@pytest.mark.parametrize("stream", [True, False])
def test_unusable_logits_fail_their_request_alone(server, client, stream):
    """Field cases 32 and 55: NaN, or nothing left to draw from."""

    def row(position, request):
        return torch.full((288,), float("nan")) if request.prompt_token_ids[0] == 66 and position > 3 else one_hot(65)

    server.script(row)
    results = {}

    def good():
        answer = client.completions.create(model="tiny", prompt=[65] * 3, extra_body={"ignore_eos": True})
        results["good"] = answer.choices[0].finish_reason

    thread = threading.Thread(target=good)
    thread.start()
    with pytest.raises(openai.APIError, match="without a finite maximum"):
        answer = client.completions.create(model="tiny", prompt=[66] * 3, stream=stream)
        list(answer)
    thread.join()
    assert results == {"good": "length"}


def test_a_lost_engine_says_so(run_server):
    """Scheduling itself fails: no request is to blame, so every one is told, and the health check too."""
    with run_server() as server:
        server.llm.scheduler.schedule = lambda: 1 // 0
        with pytest.raises(openai.InternalServerError, match="division") as error:
            server.client.completions.create(model="tiny", prompt="x")
        assert error.value.status_code == 503
        assert request(server, "GET", "/health") == (503, b'{"status":"failed"}')
        with pytest.raises(openai.InternalServerError, match="division"):
            server.client.chat.completions.create(model="tiny", messages=MESSAGES)


def test_draining_refuses_what_is_new(server, client, raw):
    server.server.draining = True
    try:
        assert raw("GET", "/health") == (503, b'{"status":"draining"}')
        with pytest.raises(openai.InternalServerError, match="shutting down") as error:
            client.completions.create(model="tiny", prompt="x")
        assert error.value.status_code == 503
    finally:
        server.server.draining = False
