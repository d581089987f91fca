"""What a client may ask for: the body of a request, checked, as prompts and sampling parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from engine_min.request import MAX_LOGPROBS, SamplingParams
from engine_min.server.errors import RequestError, refusal
from engine_min.tokenizer import Tokenizer

MAX_CHOICES = 128  # of one request, over all its prompts
DEFAULT_MAX_TOKENS = 16  # of a completion; a chat may fill the context


NUMBER = (int, float)
_SAMPLING = {  # parameters that go to the engine as they are
    "n": int,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "seed": int,
    "stop": (str, list),
    "logit_bias": dict,
    # beyond OpenAI's
    "top_k": int,
    "min_p": NUMBER,
    "min_tokens": int,
    "repetition_penalty": NUMBER,
    "stop_token_ids": list,
    "ignore_eos": bool,
}
_COMMON = _SAMPLING | {"model": str, "stream": bool, "stream_options": dict, "max_tokens": int}
_COMPLETION = _COMMON | {"prompt": (str, list), "echo": bool, "logprobs": int, "best_of": int, "suffix": str}
_CHAT = _COMMON | {
    "messages": list,
    "max_completion_tokens": int,
    "logprobs": bool,
    "top_logprobs": int,
    "response_format": dict,
    "tools": list,
    "tool_choice": (str, dict),
    "modalities": list,
}
# What clients send along and what changes nothing here.
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                   "parallel_tool_calls"}  # fmt: skip


@dataclass
class Job:
    """A checked request. `sampling` are SamplingParams' arguments but for max_tokens."""

    is_chat: bool
    sampling: dict
    max_tokens: int | None
    stream: bool
    include_usage: bool
    prompts: list = field(default_factory=list)  # texts or ids
    messages: list[dict] = field(default_factory=list)
    echo: bool = False
    only_prompt: bool = False
    top_logprobs: int | None = None  # how many to show; None: no logprobs at all

    def token_ids(self, tokenizer: Tokenizer) -> list[list[int]]:
        if self.is_chat:
            return [tokenizer.apply_chat_template(self.messages)]
        return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in self.prompts]

    def params(self, num_prompt_tokens: int, longest: int) -> SamplingParams:
        """`longest` is what the engine can hold of one sequence."""
        max_tokens = self.max_tokens
        if num_prompt_tokens + (max_tokens or 1) > longest:
            asked = f" and {max_tokens} to generate" if max_tokens else ""
            message = f"{num_prompt_tokens} prompt tokens{asked} do not fit into this model's context of {longest}"
            raise RequestError(message, "messages" if self.is_chat else "prompt", code="context_length_exceeded")
        return make_params(self.sampling | {"max_tokens": max_tokens or longest - num_prompt_tokens})


def make_params(arguments: dict) -> SamplingParams:
    try:
        return SamplingParams(**arguments)
    except ValueError as error:
        raise refusal(error) from None


def parse(body: dict, is_chat: bool, model: str) -> Job:
    """Null is as good as absent, an unknown parameter is an error: a typo must not pass for an answer."""
    known = _CHAT if is_chat else _COMPLETION
    body = {name: value for name, value in body.items() if value is not None and name not in _WITHOUT_EFFECT}
    for name, value in body.items():
        if name not in known:
            raise RequestError(f"unrecognized request argument: {name}", name)
        kinds = known[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise RequestError(f"{name} is {_short(value)}, expected {_names(kinds)}", name)
    if body.get("model", model) != model:
        message = f"the model {body['model']!r} does not exist; this server has {model!r}"
        raise RequestError(message, "model", status=404, code="model_not_found")
    if "stream_options" in body and not body.get("stream"):
        raise RequestError("stream_options need stream to be true", "stream_options")
    include_usage = body.get("stream_options", {}).get("include_usage", False)
    if not isinstance(include_usage, bool):
        raise RequestError("stream_options.include_usage is not true or false", "stream_options")
    job = Job(is_chat, _sampling(body), body.get("max_tokens"), body.get("stream", False), include_usage)
    (_parse_chat if is_chat else _parse_completion)(job, body)
    if job.top_logprobs is not None:
        job.sampling["logprobs"] = job.top_logprobs
    make_params(job.sampling | {"max_tokens": 1 << 30 if job.max_tokens is None else job.max_tokens})
    choices = max(1, len(job.prompts)) * job.sampling.get("n", 1)
    if choices > MAX_CHOICES:
        raise RequestError(f"{choices} choices are asked for, at most {MAX_CHOICES} are allowed", "n")
    return job


def _sampling(body: dict) -> dict:
    sampling = {name: body[name] for name in _SAMPLING if name in body}
    stop = sampling.get("stop", [])
    if isinstance(stop, list) and not all(isinstance(text, str) for text in stop):
        raise RequestError("stop holds something that is not text", "stop")
    if not all(_is_id(token) for token in sampling.get("stop_token_ids", [])):
        raise RequestError("stop_token_ids holds something that is not a token id", "stop_token_ids")
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _logit_bias(sampling["logit_bias"])
    return sampling


def _logit_bias(given: dict) -> dict[int, float]:
    for token, bias in given.items():
        if not token.isascii() or not token.isdigit() or isinstance(bias, bool) or not isinstance(bias, NUMBER):
            raise RequestError(f"logit_bias holds {_short(token)}: {_short(bias)}, expected id: number", "logit_bias")
    return {int(token): bias for token, bias in given.items()}


def _parse_completion(job: Job, body: dict) -> None:
    prompt = body.get("prompt")
    if prompt is None or prompt == []:
        raise RequestError("prompt is missing or empty", "prompt")
    if isinstance(prompt, str) or _is_id(prompt[0]):
        prompt = [prompt]
    if not all(isinstance(part, str) or (isinstance(part, list) and all(map(_is_id, part))) for part in prompt):
        raise RequestError("prompt is not text, token ids, or a list of either", "prompt")
    if body.get("best_of", job.sampling.get("n", 1)) != job.sampling.get("n", 1):
        raise RequestError("best_of is not supported, but for the value of n", "best_of")
    if body.get("suffix"):
        raise RequestError("suffix is not supported", "suffix")
    job.prompts = prompt
    job.echo = body.get("echo", False)
    job.top_logprobs = body.get("logprobs")
    if job.echo and job.top_logprobs is not None:
        if job.stream:
            raise RequestError("echo together with logprobs is not supported in a stream", "echo")
        job.sampling["prompt_logprobs"] = job.top_logprobs
    if job.max_tokens is None:
        job.max_tokens = DEFAULT_MAX_TOKENS
    if job.max_tokens == 0 and job.echo and not job.stream:  # the engine draws a token that nobody is shown
        job.only_prompt, job.max_tokens = True, 1


def _parse_chat(job: Job, body: dict) -> None:
    if not body.get("messages"):
        raise RequestError("messages is missing or empty", "messages")
    job.messages = [_message(message) for message in body["messages"]]
    if "max_completion_tokens" in body:
        job.max_tokens = body["max_completion_tokens"]
    if body.get("response_format", {"type": "text"}).get("type") != "text":
        raise RequestError("response_format other than text is not supported", "response_format")
    if body.get("tools") or body.get("tool_choice", "none") not in ("none", "auto"):
        raise RequestError("tools are not supported", "tools")
    if body.get("modalities", ["text"]) != ["text"]:
        raise RequestError("modalities other than text are not supported", "modalities")
    if "top_logprobs" in body and not body.get("logprobs"):
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    if not 0 <= body.get("top_logprobs", 0) <= MAX_LOGPROBS:
        message = f"top_logprobs is {body['top_logprobs']}, expected in [0, {MAX_LOGPROBS}]"
        raise RequestError(message, "top_logprobs")
    if body.get("logprobs"):
        job.top_logprobs = body.get("top_logprobs", 0)


def _message(message: object) -> dict:
    """A message as templates take it: a content of several text parts becomes one text, a line each."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError("messages holds something without a role", "messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise RequestError("messages holds content that is not text", "messages")
        content = "\n".join(parts)
    if not isinstance(content, str) and not (content is None and message["role"] == "assistant"):
        raise RequestError("messages holds content that is not text", "messages")
    return message | {"content": content or ""}


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _names(kinds: type | tuple[type, ...]) -> str:
    words = {
        int: "an integer",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
        bool: "true or false",
    }
    if kinds is NUMBER:
        return "a number"
    return " or ".join(words[kind] for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
