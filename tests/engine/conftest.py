"""Small random checkpoints in Hugging Face form, made on the spot, and the demo model."""

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine_min import LLM
from engine_min.demo import demo_model
from engine_min.export import export

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # 256 characters, one per byte value
BOS, EOS = 256, 257


def byte_tokenizer() -> Tokenizer:
    """One token per byte, then <s> and </s>."""
    vocab = {char: i for i, char in enumerate(BYTES)} | {"<s>": BOS, "</s>": EOS}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return backend


def token_ids_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text).ids


@pytest.fixture(autouse=True)
def _one_thread_for_small_models(request):
    """Threads that wait for each other cost more than they bring on matrices of 64 by 64."""
    threads = torch.get_num_threads()
    if request.module.__name__ != "test_demo_model":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_llama(tmp_path):
    """Writes a random Llama checkpoint and returns (its directory, the transformers model)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(name="model", shard_size="10GB", **overrides):
        settings = dict(
            vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, eos_token_id=EOS, bos_token_id=BOS,
        )  # fmt: skip
        config = LlamaConfig(**(settings | overrides))
        torch.manual_seed(7)
        model = LlamaForCausalLM(config).float().eval()
        for parameter in model.parameters():  # as initialised, logits would hardly differ between tokens
            torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
        path = tmp_path / name
        model.save_pretrained(path, max_shard_size=shard_size)
        byte_tokenizer().save(str(path / "tokenizer.json"))
        return path, model

    return make


@pytest.fixture
def make_llm():
    def make(path, **options):
        settings = dict(dtype="float32", num_blocks=64, max_num_seqs=16, max_num_batched_tokens=256)
        return LLM(str(path), **(settings | options))

    return make


class LogitsTap:
    """Keeps the logits of every sampled row, by request and number of tokens before it."""

    def __init__(self, llm: LLM):
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        self._runner, self._step = llm.runner, llm.runner.step
        self._logits = llm.runner.model.logits
        llm.runner.step = self.step
        llm.runner.model.logits = self.logits

    def step(self, chunks):
        self._sampling = [chunk.request for chunk in chunks if chunk.samples]
        return self._step(chunks)

    def logits(self, hidden):
        logits = self._logits(hidden)
        for request, row in zip(self._sampling, logits, strict=True):
            self.rows[request.request_id, len(request.tokens)] = row.clone()
        return logits


@pytest.fixture
def tap():
    return LogitsTap


@pytest.fixture(scope="session")
def demo_gguf() -> str:
    return str(demo_model())


@pytest.fixture(scope="session")
def demo_hf(demo_gguf, tmp_path_factory):
    """The demo model's dequantised float32 weights as a Hugging Face directory."""
    target = tmp_path_factory.mktemp("demo_hf")
    export(demo_gguf, target, torch.float32)
    return target
