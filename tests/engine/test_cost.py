"""`pagedkern-engine bench` and `memory`: what batching and context cost."""

import json

import pytest
import torch

from engine_min.bench.batching import Job, example_jobs, percentile, run_continuous, run_static, trace_jobs
from engine_min.cli import main
from engine_min.config import DTYPES
from engine_min.memory import kv_shape
from pagedkern.kv_layout import bytes_per_token

HYBRID = {"num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256}


@pytest.mark.parametrize(
    "config",
    [
        HYBRID | {"num_hidden_layers": 16},
        HYBRID | {"full_attention_interval": 4},
        HYBRID | {"layer_types": ["linear_attention"] * 48 + ["full_attention"] * 8 + ["sliding_attention"] * 8},
        {"text_config": HYBRID | {"full_attention_interval": 4}, "vision_config": {}},
    ],
)
def test_64_kib_per_token(config):
    """16 attention layers, 4 KV heads of 256 in bfloat16: 512 MiB for 8,192 tokens."""
    num_layers, num_heads, head_dim, _ = kv_shape(config)
    assert bytes_per_token(num_heads, head_dim, torch.bfloat16, num_layers) == 64 * 1024
    assert bytes_per_token(num_heads, head_dim, torch.float8_e4m3fn, num_layers) == 32 * 1024
    scaled = bytes_per_token(num_heads, head_dim, torch.float8_e4m3fn, num_layers, scales=True)
    assert scaled == 32 * 1024 + 16 * 2 * 4 * 4
    assert set(DTYPES) == {"bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"}


def test_memory_table(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HYBRID | {"full_attention_interval": 4, "max_position_embeddings": 10000}))
    assert main(["memory", "--model", str(path), "--memory-gib", "2", "--block-size", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert rows["bytes per token"][3:] == ["65,536"]
    assert rows["blocks"][1] == "2,048"
    assert [line.split() for line in lines[-2:]] == [["8,192", "512.00", "MiB", "4"], ["10,000", "625.00", "MiB", "3"]]


def test_memory_of_no_model(tmp_path, capsys):
    for model in (tmp_path, tmp_path / "absent"):
        assert main(["memory", "--model", str(model), "--memory-gib", "1"]) == 2
        assert f"'{model}' is neither a config.json nor a directory with one" in capsys.readouterr().err


def test_memory_of_a_checkpoint(make_llama, make_llm, capsys):
    path, _ = make_llama()
    assert main(["memory", "--model", str(path), "--memory-gib", "1", "--kv-cache-dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "2 attention layers, 2 KV heads of 16, float32" in out
    llm = make_llm(path)
    stored = llm.kv_cache.storage
    assert f"{stored.numel() * 4 // (64 * 16):,}" in out  # bytes per token of 64 blocks of 16
    weights = (path / "model.safetensors").stat().st_size
    assert f"{weights:,}" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--memory-gib", "0.0001"], "leave no room for a block"),
        (["--dynamic-scales"], "scales belong to FP8 caches"),
        (["--block-size", "0"], "block_size is 0"),
    ],
)
def test_memory_errors(make_llama, capsys, arguments, message):
    assert main(["memory", "--model", str(make_llama()[0]), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", [{"num_key_value_heads": 0}, {"num_hidden_layers": -16}, {"num_hidden_layers": "four"}], ids=str
)
def test_configs_of_nothing(tmp_path, capsys, change):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64} | change))
    assert main(["memory", "--model", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected at least 1 of each" in line or "cannot be read" in line


@pytest.mark.parametrize("config, missing", [({}, "num_hidden_layers"), ({"num_hidden_layers": 1}, "num_attention")])
def test_configs_that_say_too_little(tmp_path, capsys, config, missing):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["memory", "--model", str(path)]) == 2
    assert f"config.json lacks the key '{missing}" in capsys.readouterr().err


# ---- Static against continuous.


def test_bubbles_are_what_the_lengths_say(make_llama, make_llm):
    """Four slots, 4 requests of 2, 3, 5 and 9 tokens: static keeps all four until the last is done."""
    llm = make_llm(make_llama()[0], max_num_seqs=4, num_blocks=64, block_size=4)
    jobs = [Job([1] * 4, count) for count in (2, 3, 5, 9)]
    static, continuous = run_static(llm, jobs, 4), run_continuous(llm, jobs, 4)
    assert static.useful == continuous.useful == 19
    assert (static.steps, static.bubbles) == (9, 7 + 6 + 4)
    assert (continuous.steps, continuous.bubbles) == (9, 0)
    assert static.busy == continuous.busy == [4, 4, 3, 2, 2, 1, 1, 1, 1]
    assert static.reserved == 9 * 4 * 13
    assert static.filled == sum(4 + i for count in (2, 3, 5, 9) for i in range(1, count))
    assert len(static.latencies) == len(continuous.first) == 4


def test_continuous_fills_the_slots_that_static_leaves_idle(make_llama, make_llm):
    llm = make_llm(make_llama()[0], max_num_seqs=4, num_blocks=256)
    jobs = trace_jobs(256, 40, 64)
    static, continuous = run_static(llm, jobs, 4), run_continuous(llm, jobs, 4)
    assert static.useful == continuous.useful == sum(job.num_tokens for job in jobs)
    assert continuous.bubbles == 0 < static.bubbles
    assert continuous.steps < static.steps
    assert continuous.waste < static.waste
    assert all(busy == 4 for busy in continuous.busy[: continuous.steps // 2])
    assert len(static.latencies) == len(continuous.latencies) == 40


def test_example_and_trace():
    assert [job.num_tokens for job in example_jobs(100)] == [50, 120, 240, 1024]
    jobs = trace_jobs(100, 200, 384)
    assert jobs == trace_jobs(100, 200, 384) != trace_jobs(100, 200, 384, seed=1)
    assert len(jobs) == 200 and max(job.length for job in jobs) <= 384
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0, 25, 50, 51, 99, 100)] == [1, 1, 2, 3, 4, 4]


def test_bench_prints_a_table_and_writes_a_plot(make_llama, tmp_path, capsys):
    path, picture = make_llama()[0], tmp_path / "plot.png"
    arguments = ["--model", str(path), "--requests", "12", "--longest", "48", "--max-num-seqs", "4", "--skip-example"]
    assert main(["bench", *arguments, "--plot", str(picture), "--num-blocks", "64"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:3] == ["12", "requests", "tokens"]
    assert [line.split()[0] for line in out[1:4]] == ["static", "continuous", "continuous"]
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10000
