"""The text of one choice as its tokens arrive, and when it ends."""

from __future__ import annotations

import codecs

from engine_min.request import SamplingParams
from engine_min.tokenizer import Tokenizer


class OutputText:
    """Held back are the bytes of a character that is not complete, and text that may turn out to be the start of a stop
    text, so that none of it is ever given out. Everything in it is immutable: a fork is a copy."""

    __slots__ = ("_params", "_stops", "_stop_ids", "_num_tokens", "_plain_below", "_held",
                 "_pieces", "_drops_space", "_is_plain", "_bytes")  # fmt: skip

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stop_ids: frozenset[int]):
        self._params = params
        self._stops = params.stops
        self._stop_ids = stop_ids
        self._num_tokens = 0
        self._plain_below = 0 if params.stops else params.max_tokens  # up to there only a stop id can end it
        self._held = ""
        self._pieces = tokenizer.pieces
        self._drops_space = tokenizer.drops_first_space
        self._is_plain = not self._drops_space  # no bytes are held, and this is not the start
        self._bytes = b""

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The text that the token sets free, and the reason if it is the last one: "stop" or "length"."""
        self._num_tokens += 1
        is_stop_id = token_id in self._stop_ids
        if self._num_tokens < self._plain_below and not is_stop_id:
            piece = self._pieces.get(token_id, "")
            return piece if self._is_plain and type(piece) is str else self._decode(piece), None
        may_stop = self._num_tokens > self._params.min_tokens
        is_stop = may_stop and is_stop_id
        if not is_stop:
            self._held += self._decode(self._pieces.get(token_id, ""))
        is_last = is_stop or self._num_tokens == self._params.max_tokens
        if is_last:
            self._held += self._bytes.decode("utf-8", "replace")
        found = min((at for at in map(self._held.find, self._stops) if at >= 0), default=None) if may_stop else None
        if found is not None or is_last:
            return self._held[:found], "stop" if is_stop or found is not None else "length"
        count = len(self._held) - (self._num_waiting() if may_stop else 0)
        text, self._held = self._held[:count], self._held[count:]
        return text, None

    def _decode(self, piece: str | bytes) -> str:
        data = self._bytes + (piece.encode() if isinstance(piece, str) else piece)
        if self._drops_space and data:
            self._drops_space, data = False, data.removeprefix(b" ")
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._bytes = data[used:]
        self._is_plain = not self._bytes and not self._drops_space
        return text

    def _num_waiting(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
