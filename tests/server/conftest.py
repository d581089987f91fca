"""A server of a small random model in this process, and the real `openai` client."""

import http.client
import json
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
from checkpoints import EOS, token_ids_of, write_checkpoint
from scripted import one_hot, script_logits

from engine_min import LLM
from engine_min.server.app import Server
from engine_min.server.main import DrainingServer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if messages[0].role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}answer: "
)


class RunningServer:
    def __init__(self, llm, **limits):
        from openai import OpenAI

        self.llm = llm
        self._unscripted = llm.runner.step, llm.runner.model.logits
        self.server = Server(llm, "tiny", **limits)
        self.uvicorn = DrainingServer(self.server, "127.0.0.1", 0, drain_seconds=5)
        self._thread = threading.Thread(target=self.uvicorn.run)
        self._thread.start()
        while not self.uvicorn.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=30)

    def close(self):
        self.client.close()
        self.uvicorn.should_exit = True
        self._thread.join()

    def say(self, text):
        """Makes the model answer with the text and then its end token, whatever it is asked."""
        tokens = [*token_ids_of(text), EOS] if isinstance(text, str) else text
        self.script(lambda position, request: one_hot(tokens[min(request.num_generated, len(tokens) - 1)]))

    def script(self, row):
        self.unscript()
        script_logits(self.llm, row)

    def unscript(self):
        self.llm.runner.step, self.llm.runner.model.logits = self._unscripted

    def wait_idle(self):
        deadline = time.monotonic() + 10
        while self.llm.has_unfinished() or self.llm.stats().blocks_used:
            assert time.monotonic() < deadline, f"still busy: {self.llm.stats()}"
            time.sleep(0.01)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, chat_template=TEMPLATE)
    return path


@pytest.fixture(scope="session")
def make_llm(checkpoint):
    torch.set_num_threads(1)

    def make(**options):
        settings = dict(dtype="float32", num_blocks=64, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=256)
        return LLM(str(checkpoint), **(settings | options))

    return make


@pytest.fixture
def run_server(make_llm):
    """run_server(engine options, server limits): a context that ends with the engine idle."""

    @contextmanager
    def run(limits=None, **options):
        running = RunningServer(make_llm(**options), **(limits or {}))
        try:
            yield running
        finally:
            running.close()

    return run


@pytest.fixture(scope="module")
def shared(make_llm):
    running = RunningServer(make_llm())
    yield running
    running.close()


@pytest.fixture
def server(shared):
    """One server for a module's tests; each leaves it idle, without a script and without a used block."""
    yield shared
    shared.wait_idle()
    shared.unscript()
    shared.llm.blocks.check_integrity()


@pytest.fixture
def client(server):
    return server.client


@pytest.fixture
def raw(server):
    return lambda *args, **options: request(server, *args, **options)


def request(server, method, path, body=None):
    """(status, body) of one plain HTTP request; a body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
