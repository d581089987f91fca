"""The server as a process, and under load."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from soak import soak

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def process(checkpoint):
    command = [sys.executable, "-m", "engine_min.cli", "serve", "--model", str(checkpoint), "--port", "0"]
    command += ["--num-blocks", "64", "--dtype", "float32", "--served-model-name", "tiny", "--max-num-seqs", "4"]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ
    )
    yield child
    child.kill()
    child.communicate()


def test_sigterm_lets_what_runs_finish(process):
    url = process.stdout.readline().split()[-1]
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        options = dict(model="tiny", prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True})
        stream = client.completions.create(**options, stream_options={"include_usage": True})
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        last = list(stream)[-1]
        assert last.usage.completion_tokens == 500
        with pytest.raises(openai.APIError):
            client.completions.create(model="tiny", prompt="x")
    assert process.wait(60) == 0
    assert process.stderr.read().count("Traceback") == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "/nowhere"], "neither a directory with a config.json nor a .gguf file"),
        (["--model", "{model}", "--block-size", "0"], "block_size is 0"),
    ],
)
def test_what_cannot_be_served(checkpoint, capsys, arguments, message):
    from engine_min.cli import main

    assert main(["serve", *(argument.format(model=checkpoint) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_port_in_use(checkpoint, server, capsys):
    from engine_min.cli import main

    arguments = ["--model", str(checkpoint), "--num-blocks", "8", "--port", str(server.port)]
    assert main(["serve", *arguments]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_soak(run_server):
    """A few seconds of what `python tests/server/soak.py` does for ten minutes."""
    with run_server(num_blocks=24) as server:  # few blocks: preemptions belong to it
        report = soak(server, seconds=4, num_clients=32)
        assert not [name for name in report if name.startswith("ERROR")], report
        assert len(report) == 6 and min(report.values()) > 1, report
        assert server.llm.stats().preempted > 0
