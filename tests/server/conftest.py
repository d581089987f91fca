"""Servers of a small random model in this process."""

from contextlib import contextmanager

import pytest
import torch
from running import TEMPLATE, RunningServer, request

from engine_min import LLM


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    from checkpoints import write_checkpoint

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
