"""Text to ids and back: byte level BPE from a GGUF file, the chat template, streaming without broken characters."""

import copy
import random

import pytest
from checkpoints import byte_tokenizer, token_ids_of
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models

from engine_min import SamplingParams
from engine_min.checkpoint import open_checkpoint
from engine_min.server.responses import token_bytes
from engine_min.tokenizer import OutputText, Tokenizer


@pytest.fixture(scope="module")
def smollm(demo_gguf):
    return open_checkpoint(demo_gguf).tokenizer()


def test_words_digits_and_special_tokens(smollm):
    tokens = [smollm.backend.id_to_token(i) for i in smollm.encode("Hello world, it's 1234!\n<|im_end|>")]
    assert tokens == ["Hello", "Ġworld", ",", "Ġit", "'s", "Ġ", "1", "2", "3", "4", "!", "Ċ", "<|im_end|>"]


@pytest.mark.parametrize(
    "text", ["", " ", "  two  spaces ", "a🙂世ď", "\n\n\tx", "naïve café — “quoted”", "日本語のテキスト"]
)
def test_round_trip(smollm, text):
    assert smollm.decode(smollm.encode(text)) == text


def test_chat_template(smollm):
    token_ids = smollm.apply_chat_template([{"role": "user", "content": "Hi <|im_end|> there"}])
    text = smollm.backend.decode(token_ids, skip_special_tokens=False)
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert text == system + "<|im_start|>user\nHi <|im_end|> there<|im_end|>\n<|im_start|>assistant\n"
    own = smollm.apply_chat_template([{"role": "system", "content": "Be brief."}], add_generation_prompt=False)
    assert smollm.backend.decode(own, skip_special_tokens=False) == "<|im_start|>system\nBe brief.<|im_end|>\n"


def test_template_errors_and_absence():
    refusing = Tokenizer(byte_tokenizer(), "{{ raise_exception('no system role') }}", "<s>", "</s>")
    with pytest.raises(ValueError, match="no system role"):
        refusing.apply_chat_template([])
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(byte_tokenizer(), None, "<s>", "</s>").apply_chat_template([])


def test_one_beginning_token_either_way():
    """Field case 56: the template writes it, plain text gets it, never both."""
    tokenizer = Tokenizer(byte_tokenizer(), "{{ bos_token }}{{ messages[0].content }}", "<s>", "</s>", prepend_bos=True)
    expected = tokenizer.encode("hey")
    assert expected[0] == 256 and expected.count(256) == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hey"}]) == expected
    assert tokenizer.encode("<s>hey") == expected  # a text that has been through the template
    assert tokenizer.encode("hey", add_special_tokens=False) == expected[1:]
    assert tokenizer.encode("<s><s>", add_special_tokens=False) == [256, 256]


# ---- Streaming (field case 50).


class TextDecoder(OutputText):
    """The text alone, of a choice that nothing ends."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, SamplingParams(max_tokens=10**9), frozenset())

    def push(self, token_id):
        return super().push(token_id)[0]

    def flush(self):
        return self._bytes.decode("utf-8", "replace")


@pytest.fixture
def stream():
    return TextDecoder(Tokenizer(byte_tokenizer(), None, None, None))


@pytest.mark.parametrize("text", ["a🙂世ď", "A 世", "plain", "🙂🙂", "é", "  a  b "])
def test_deltas_join_to_the_text_without_replacement_characters(stream, text):
    deltas = [stream.push(token) for token in token_ids_of(text)] + [stream.flush()]
    assert "".join(deltas) == text
    assert all(len(delta) <= 2 for delta in deltas)  # given out as they complete, not at the end
    assert deltas[-1] == ""


def test_cut_off_character_comes_out_once(stream):
    deltas = [stream.push(token) for token in token_ids_of("a🙂")[:-1]] + [stream.flush()]
    assert deltas[0] == "a" and "".join(deltas) in ("a", "a\ufffd")


def test_lone_continuation_byte_does_not_hold_the_rest_back(stream):
    lone = byte_tokenizer().token_to_id("Ģ")  # byte 0x80
    deltas = [stream.push(token) for token in [*token_ids_of("a"), lone, *token_ids_of("bc")]]
    assert "".join(deltas) == "a\ufffdbc"


@pytest.mark.parametrize("filler", ["Ģ", "ð", "</s>"])
def test_a_thousand_tokens_that_are_no_text_are_given_out(stream, filler):
    """Bytes that can never become a character are not held for ever."""
    token = byte_tokenizer().token_to_id(filler)
    deltas = [stream.push(token) for _ in range(1000)]
    text = "".join(deltas) + "".join(stream.push(token) for token in token_ids_of("ď!")) + stream.flush()
    expected = "" if filler == "</s>" else "\ufffd" * 1000
    assert text == expected + "ď!"
    assert filler == "</s>" or len("".join(deltas)) > 900


def test_bytes_of_tokens():
    """Field case 52: also those that are a part of a character."""
    tokenizer = Tokenizer(byte_tokenizer(), None, "<s>", "</s>")
    for text in ("a🙂世ď", " \n"):
        assert b"".join(token_bytes(tokenizer, token) for token in token_ids_of(text)) == text.encode()
    assert (token_bytes(tokenizer, 256), token_bytes(tokenizer, 9999)) == (b"<s>", b"")


def test_bytes_of_sentencepiece_tokens():
    vocab = {"<unk>": 0, "<0xE4>": 1, "\u2581a": 2, "ď": 3}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend, None, None, None)
    assert [token_bytes(tokenizer, token) for token in (1, 2, 3)] == [b"\xe4", b" a", "ď".encode()]
    stream = TextDecoder(tokenizer)
    assert [stream.push(token) for token in (2, 2, 1, 3)] == ["a", " a", "", "\ufffdď"]


def test_special_tokens_leave_no_text(stream):
    assert [stream.push(token) for token in [256, *token_ids_of("x"), 257, *token_ids_of("y")]] == ["", "x", "", "y"]


def sentencepiece_tokenizer(strips):
    words = ["<unk>", "\u2581a", "\u2581", "b", "\u2581\u2581", "ď", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: i for i, word in enumerate(words)}
    backend = BackendTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return Tokenizer(backend, None, None, None)


@pytest.mark.parametrize("kind", ["byte level", "small", "sentencepiece", "without strip", "metaspace"])
def test_pieces_join_to_the_text_of_the_whole(smollm, kind):
    """Whatever the ids: parts of characters, special tokens and ids that are none."""
    metaspace = Tokenizer(
        BackendTokenizer(models.BPE(vocab={"\u2581a": 0, "b": 1, "\u2581": 2}, merges=[])), None, None, None
    )
    metaspace.backend.decoder = decoders.Metaspace()
    tokenizer, size = {
        "byte level": (smollm, 49200), "small": (Tokenizer(byte_tokenizer(), None, None, None), 290),
        "sentencepiece": (sentencepiece_tokenizer(True), 6), "without strip": (sentencepiece_tokenizer(False), 6),
        "metaspace": (metaspace, 3),
    }[kind]  # fmt: skip
    rng = random.Random(0)
    for length in (1, 3, 10, 200):
        for _ in range(50):
            token_ids = [rng.randrange(size) for _ in range(length)]
            stream = TextDecoder(tokenizer)
            assert "".join(map(stream.push, token_ids)) + stream.flush() == tokenizer.decode(token_ids)


def test_characters_by_byte_fallback():
    tokenizer = sentencepiece_tokenizer(True)
    token_ids = [1, *(6 + byte for byte in "世🙂".encode()), 1]
    stream = TextDecoder(tokenizer)
    deltas = [stream.push(token) for token in token_ids]
    assert deltas == ["a", "", "", "世", "", "", "", "🙂", " a"] and "".join(deltas) == tokenizer.decode(token_ids)


def test_no_more_than_a_character_is_held_back():
    tokenizer = Tokenizer(byte_tokenizer(), None, None, None)
    stream = TextDecoder(tokenizer)
    ids = token_ids_of("a🙂b")
    assert [stream.push(token) for token in ids] == ["a", "", "", "", "🙂", "b"]
    other = TextDecoder(tokenizer)
    other.push(ids[1])
    fork = copy.copy(other)
    assert "".join(map(fork.push, ids[2:])) == "🙂b" and other.flush() == "\ufffd"
