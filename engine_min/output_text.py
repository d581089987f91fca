"""The text of one choice as its tokens arrive, and when it ends."""

from __future__ import annotations

import copy

from engine_min.request import SamplingParams
from engine_min.tokenizer import Tokenizer


class OutputText:
    """Text that may turn out to be the start of a stop text is held back, so that none of it is ever given out."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stop_ids: frozenset[int]):
        self._decoder = tokenizer.stream_decoder()
        self._params = params
        self._stops = params.stops
        self._stop_ids = stop_ids
        self._num_tokens = 0
        self._held = ""
        self._plain_below = 0 if params.stops else params.max_tokens  # up to there only a stop id can end it

    def fork(self) -> OutputText:
        other = copy.copy(self)
        other._decoder = self._decoder.fork()
        return other

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that the token sets free, and the reason if it is the last one: "stop" or "length"."""
        self._num_tokens += 1
        if self._num_tokens < self._plain_below and token_id not in self._stop_ids:
            return self._decoder.push(token_id), None
        may_stop = self._num_tokens > self._params.min_tokens
        if may_stop and token_id in self._stop_ids:
            return self._end(self._decoder.flush(), may_stop, "stop")
        text = self._decoder.push(token_id)
        if self._num_tokens == self._params.max_tokens:
            return self._end(text + self._decoder.flush(), may_stop, "length")
        if not self._stops:
            return text, None
        self._held += text
        if not may_stop:
            return self._give(len(self._held)), None
        found = self._find()
        if found is not None:
            return self._give(found), "stop"
        return self._give(len(self._held) - self._num_waiting()), None

    def _end(self, text: str, may_stop: bool, reason: str) -> tuple[str, str]:
        self._held += text
        found = self._find() if may_stop else None
        return self._held[:found], reason if found is None else "stop"

    def _find(self) -> int | None:
        return min((at for at in map(self._held.find, self._stops) if at >= 0), default=None)

    def _num_waiting(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0

    def _give(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text
