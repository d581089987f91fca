"""OpenAI's response objects."""

from __future__ import annotations

import codecs
import json
import time
import uuid

from engine_min.request import RequestOutput
from engine_min.server.engine_thread import Stream, Update
from engine_min.server.protocol import Job
from engine_min.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no minus infinity


class Responder:
    """Builds the answer to one request: whole, or in chunks as updates come. Choices count through all prompts."""

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer, num_choices: int):
        prefix, kind = ("chatcmpl", "chat.completion") if job.is_chat else ("cmpl", "text_completion")
        self.request_id = f"{prefix}-{uuid.uuid4().hex}"
        self._kind = kind
        self._job = job
        self._tokenizer = tokenizer
        self._head = {"id": self.request_id, "created": int(time.time()), "model": model}
        self._logprobs = [_Logprobs(tokenizer, job) for _ in range(num_choices)]

    def whole(self, prompts: list[str], streams: list[Stream], updates: list[list[Update]]) -> dict:
        """`updates` holds those of each choice, in order."""
        per_prompt = len(updates) // len(streams)
        choices = [
            self._choice(i, prompts[i], parts, streams[i // per_prompt].output) for i, parts in enumerate(updates)
        ]
        used = usage(streams, count_generated=not self._job.only_prompt)
        return self._head | {"object": self._kind, "choices": choices, "usage": used}

    def _choice(self, index: int, prompt: str, updates: list[Update], output: RequestOutput) -> dict:
        reason = updates[-1].finish_reason
        if self._job.only_prompt:
            updates, reason = [], "length"
        text = prompt + "".join(update.text for update in updates)
        payload = {"message": {"role": "assistant", "content": text}} if self._job.is_chat else {"text": text}
        logprobs = self._logprobs[index].of(updates, output)
        return {"index": index, **payload, "logprobs": logprobs, "finish_reason": reason}

    def first_chunk(self, index: int, prompt: str) -> dict | None:
        """What a choice's stream begins with: the role of a chat, the prompt of a completion that echoes."""
        if self._job.is_chat:
            return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, None)
        return self._chunk(index, {"text": prompt}, None, None) if prompt else None

    def chunk(self, index: int, update: Update) -> dict | None:
        """None where the update has nothing to tell yet."""
        if not update.text and update.finish_reason is None and update.logprobs is None:
            return None
        payload = {"text": update.text}
        if self._job.is_chat:
            payload = {"delta": {"content": update.text} if update.text or update.finish_reason is None else {}}
        return self._chunk(index, payload, self._logprobs[index].of([update]), update.finish_reason)

    def _chunk(self, index: int, payload: dict, logprobs: dict | None, reason: str | None) -> dict:
        choice = {"index": index, **payload, "logprobs": logprobs, "finish_reason": reason}
        chunk = self._head | {"object": self._chunk_kind, "choices": [choice]}
        return chunk | {"usage": None} if self._job.include_usage else chunk

    def usage_chunk(self, streams: list[Stream]) -> dict:
        return self._head | {"object": self._chunk_kind, "choices": [], "usage": usage(streams)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._job.is_chat else "text_completion"


def usage(streams: list[Stream], count_generated: bool = True) -> dict:
    """A prompt counts once, however many choices it has."""
    outputs = [stream.output for stream in streams]
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(choice.token_ids) for output in outputs for choice in output.outputs) * count_generated
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def event(data: dict | str) -> bytes:
    return b"data: " + (data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)).encode() + b"\n\n"


class _Logprobs:
    """The logprobs of one choice, in the form of chats or of completions, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, job: Job):
        self._tokenizer = tokenizer
        self._count = job.top_logprobs
        self._of = self._chat if job.is_chat else self._completion
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, updates: list[Update], output: RequestOutput | None = None) -> dict | None:
        """Of the prompt, too, where the output is given and has them."""
        if self._count is None:
            return None
        entries = []
        if output is not None and output.prompt_logprobs is not None:
            entries += zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        entries += [
            (token, logprobs)
            for update in updates
            for token, logprobs in zip(update.token_ids, update.logprobs, strict=True)
        ]
        return self._of(entries)

    def _bytes_of(self, token: int) -> bytes:
        return token_bytes(self._tokenizer, token)

    def _top(self, logprobs: dict[int, float]) -> list[tuple[int, float]]:
        return sorted(logprobs.items(), key=lambda entry: -entry[1])[: self._count]

    def _chat(self, entries: list[tuple[int, dict[int, float]]]) -> dict:
        content = [
            self._entry(token, logprobs[token])
            | {"top_logprobs": [self._entry(other, value) for other, value in self._top(logprobs)]}
            for token, logprobs in entries
        ]
        return {"content": content}

    def _entry(self, token: int, value: float) -> dict:
        raw = self._bytes_of(token)
        return {"token": _as_text(raw), "logprob": max(value, _LOWEST), "bytes": list(raw)}

    def _completion(self, entries: list[tuple[int, dict[int, float] | None]]) -> dict:
        """The first token of a prompt follows nothing: it has no logprobs. Special tokens are no text."""
        offsets = []
        for token, _ in entries:
            offsets.append(self._offset)
            if token not in self._tokenizer.special_ids:
                self._offset += len(self._decoder.decode(self._bytes_of(token)))
        tops = [
            logprobs and {_as_text(self._bytes_of(other)): max(v, _LOWEST) for other, v in self._top(logprobs)}
            for _, logprobs in entries
        ]
        return {
            "tokens": [_as_text(self._bytes_of(token)) for token, _ in entries],
            "token_logprobs": [logprobs and max(logprobs[token], _LOWEST) for token, logprobs in entries],
            "top_logprobs": tops if self._count else None,
            "text_offset": offsets,
        }


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The token by itself, also where that is only a part of a character."""
    if token_id in tokenizer.special_ids:
        return tokenizer.backend.id_to_token(token_id).encode()
    piece = tokenizer.pieces.get(token_id, b"")
    return piece.encode() if isinstance(piece, str) else piece


def _as_text(raw: bytes) -> str:
    """A token that is a part of a character is shown by its bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
