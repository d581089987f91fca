"""Text to ids, the chat template, and the text of ids as they arrive."""

import codecs
import json
from datetime import datetime
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as BackendTokenizer

from engine_min.request import SamplingParams

_SPACE = "\u2581"  # SentencePiece's


# GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the rest for characters from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


class Tokenizer:
    def __init__(self, backend: BackendTokenizer, chat_template: str | None, bos: str | None, eos: str | None,
                 prepend_bos: bool = False):  # fmt: skip
        self.backend = backend
        self.bos_token = bos
        self.eos_token = eos
        self.chat_template = chat_template
        self._prepend_bos = prepend_bos  # which the backend does not do by itself
        self.special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens` adds what the model's own tokenizer adds, a beginning token for most; a text that begins
        with one, as a chat template writes it, gets no second."""
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if not add_special_tokens or self.bos_token is None:
            return ids
        bos = self.backend.token_to_id(self.bos_token)
        ids = [bos] * self._prepend_bos + ids
        return ids[1:] if ids[:2] == [bos, bos] else ids

    @cached_property
    def pieces(self) -> dict[int, str | bytes]:
        """What each token but the special ones adds to a text; bytes where they are no whole characters."""
        is_byte_level = b"ByteLevel" in self.backend.decoder.__getstate__() if self.backend.decoder else False
        pieces: dict[int, str | bytes] = {}
        for token, i in self.backend.get_vocab(with_added_tokens=True).items():
            if len(token) == 6 and token.startswith("<0x"):  # byte fallback of SentencePiece
                piece = bytes([int(token[3:5], 16)])
            elif is_byte_level:
                piece = bytes(map(_BYTE_OF.get, token)) if _BYTE_OF.keys() >= set(token) else token.encode()
            else:
                piece = token.replace(_SPACE, " ").encode()
            try:
                pieces[i] = piece.decode()
            except UnicodeDecodeError:
                pieces[i] = piece
        return {i: piece for i, piece in pieces.items() if i not in self.special_ids}

    @cached_property
    def drops_first_space(self) -> bool:
        """Of a text, as SentencePiece does, whose words begin with one."""
        words = (i for i, piece in self.pieces.items() if isinstance(piece, str) and piece.startswith(" "))
        word = next(words, None)
        return word is not None and len(self.decode([word])) < len(self.pieces[word])

    def decode(self, token_ids: list[int]) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=True)

    def apply_chat_template(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation. The template writes every special token itself, so none is added."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template")
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        text = environment.from_string(self.chat_template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, bos_token=self.bos_token or "",
            eos_token=self.eos_token or "",
        )  # fmt: skip
        return self.encode(text, add_special_tokens=False)


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def tokenizer_from_hf(path: Path) -> Tokenizer:
    config_path, template_path = path / "tokenizer_config.json", path / "chat_template.jinja"
    config = json.loads(config_path.read_text()) if config_path.exists() else {}
    template = template_path.read_text() if template_path.exists() else config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    names = [config.get("bos_token"), config.get("eos_token")]
    bos, eos = (name["content"] if isinstance(name, dict) else name for name in names)
    backend = BackendTokenizer.from_file(str(path / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, template, bos, eos)


class OutputText:
    """The text of one choice as its tokens arrive, and when it ends.

    Held back are the bytes of a character that is not complete, and text that may turn out to be the start of a stop
    text, so that none of it is ever given out. Everything in it is immutable: a fork is a copy."""

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
        starts = (n for n in range(longest, 0, -1) if any(stop.startswith(self._held[-n:]) for stop in self._stops))
        return next(starts, 0)
