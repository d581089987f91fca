"""Small random checkpoints in Hugging Face form, made on the spot, and the demo model."""

import pytest
import torch
from checkpoints import write_checkpoint

from bench.demo import demo_model
from bench.export_hf import export
from engine_min import LLM


@pytest.fixture(autouse=True)
def _one_thread_for_small_models(request):
    """Threads that wait for each other cost more than they bring on matrices of 64 by 64."""
    threads = torch.get_num_threads()
    if request.module.__name__ != "test_demo_model":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_checkpoint(tmp_path):
    """Writes a random checkpoint and returns (its directory, the transformers model)."""

    def make(name="model", **options):
        return tmp_path / name, write_checkpoint(tmp_path / name, **options)

    return make


@pytest.fixture
def make_llama(make_checkpoint):
    return make_checkpoint


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

    def step(self, batch):
        self._sampling = [request for request in batch if request.samples]
        return self._step(batch)

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
