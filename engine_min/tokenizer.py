"""Text to ids and back, the chat template, and text that streams without broken characters."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_of() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the rest for characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_of()
_SPACE = "\u2581"  # SentencePiece's
_CONTROL_TOKEN, _USER_TOKEN = 3, 4  # tokenizer.ggml.token_type


class Tokenizer:
    def __init__(self, backend: BackendTokenizer, chat_template: str | None, bos: str | None, eos: str | None,
                 prepend_bos: bool = False):  # fmt: skip
        self.backend = backend
        self.bos_token = bos
        self.eos_token = eos
        self.chat_template = chat_template
        self._bos_ids = [backend.token_to_id(bos)] if prepend_bos else []
        self._special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens` adds what the model's own tokenizer adds, a beginning token for most; a text that begins
        with one, as a chat template writes it, gets no second."""
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        ids = self._bos_ids + ids if add_special_tokens else ids
        twice = self.bos_token is not None and ids[:2] == [self.backend.token_to_id(self.bos_token)] * 2
        return ids[1:] if add_special_tokens and twice else ids

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
        return {i: piece for i, piece in pieces.items() if i not in self._special_ids}

    @cached_property
    def drops_first_space(self) -> bool:
        """Of a text, as SentencePiece does, whose words begin with one."""
        words = (i for i, piece in self.pieces.items() if isinstance(piece, str) and piece.startswith(" "))
        word = next(words, None)
        return word is not None and len(self.decode([word])) < len(self.pieces[word])

    def decode(self, token_ids: list[int]) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=True)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The token by itself, also where that is only a part of a character."""
        if token_id in self._special_ids:
            return self.backend.id_to_token(token_id).encode()
        piece = self.pieces.get(token_id, b"")
        return piece.encode() if isinstance(piece, str) else piece

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


def load_tokenizer(model: str, gguf_metadata: dict | None) -> Tokenizer:
    return _from_gguf(gguf_metadata) if gguf_metadata is not None else _from_hf(Path(model).expanduser())


def _from_hf(path: Path) -> Tokenizer:
    config_path, template_path = path / "tokenizer_config.json", path / "chat_template.jinja"
    config = json.loads(config_path.read_text()) if config_path.exists() else {}
    template = template_path.read_text() if template_path.exists() else config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)

    def token(key: str) -> str | None:
        value = config.get(key)
        return value["content"] if isinstance(value, dict) else value

    backend = BackendTokenizer.from_file(str(path / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, template, token("bos_token"), token("eos_token"))


def _from_gguf(metadata: dict) -> Tokenizer:
    """GPT-2 style byte level BPE from the vocabulary and merges in the file."""
    kind, split = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ValueError(f"GGUF tokenizer {kind!r} is not supported, expected 'gpt2' (byte level BPE)")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a whole word that is a token as it is, without merging its way there.
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split == "llama-bpe"))
    backend.pre_tokenizer = _pre_tokenizer(split)
    backend.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    added = [i for i, token_type in enumerate(types) if token_type in (_CONTROL_TOKEN, _USER_TOKEN)]
    backend.add_special_tokens([_added(tokens[i], True) for i in added if types[i] == _CONTROL_TOKEN])
    backend.add_tokens([_added(tokens[i], False) for i in added if types[i] == _USER_TOKEN])

    def token(key: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return None if token_id is None else tokens[token_id]

    prepend_bos = metadata.get("tokenizer.ggml.add_bos_token", split == "llama-bpe")
    return Tokenizer(backend, metadata.get("tokenizer.chat_template"), token("bos"), token("eos"), prepend_bos)


def _added(content: str, special: bool) -> AddedToken:
    return AddedToken(content, special=special, normalized=False)


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut into words before the merges; GGUF names the rule after the first model that had it."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split in ("default", "gpt-2"):
        return byte_level
    if split == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if split == "llama-bpe":
        words = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ValueError(f"GGUF pre-tokenizer {split!r} is not supported, expected default, gpt-2, smollm or llama-bpe")
