"""Two processes share a model over gloo: the same tokens as one alone."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine_min import LLM, SamplingParams, StepError
from engine_min.config import model_config_from_hf
from engine_min.launch import launch
from engine_min.parallel import TensorParallel

OPTIONS = dict(dtype="float32", num_blocks=64, max_num_seqs=16, max_num_batched_tokens=64, block_size=8)
PROMPTS = [[(i * 37 + j * 11) % 256 for j in range(length)] for i, length in enumerate((1, 5, 16, 33, 90))]
MODELS = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "odd-vocabulary": ("Llama", {"vocab_size": 289, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
}


def run(llm) -> list:
    """Greedy and drawn, choices, penalties, logprobs to three digits; what is drawn depends on every logit."""
    params = [
        SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=8, seed=3, n=2, ignore_eos=True),
        SamplingParams(max_tokens=8, seed=4, top_p=0.9, presence_penalty=0.5, ignore_eos=True, logprobs=2),
    ]
    outputs = []
    for setting in params:
        outputs += llm.generate(PROMPTS, setting)
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def member(rank: int, port: int, paths: list[str]) -> None:
    """One of two processes that make the same calls, as under torchrun."""
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, world_size=2, is_master=rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    results = [run(LLM(path, **OPTIONS, tensor_parallel_size=2)) for path in paths]
    half = LLM(paths[0], **(OPTIONS | {"dtype": "bfloat16", "num_blocks": 16 + rank}), tensor_parallel_size=2)
    results.append([half.kv_cache.num_blocks, len(run(half))])
    torch.distributed.destroy_process_group()
    print(json.dumps(results))


def test_same_tokens_as_one(make_checkpoint):
    paths = []
    for name, (family, options) in MODELS.items():
        paths.append(str(make_checkpoint(name=name, family=family, **options)[0]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = Path(__file__).resolve().parents[2]
    members = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(port), *paths], stdout=subprocess.PIPE, text=True,
                         env=os.environ | {"PYTHONPATH": str(root)})
        for rank in range(2)
    ]  # fmt: skip
    expected = [run(LLM(path, **OPTIONS)) for path in paths]
    answers = [process.communicate(timeout=300)[0] for process in members]
    assert [process.returncode for process in members] == [0, 0]
    first, second = (json.loads(answer.splitlines()[-1]) for answer in answers)
    for name, one, ours, theirs in zip(MODELS, expected, first, second, strict=False):
        assert ours == theirs == one, name
    assert first[-1] == second[-1] == [16, 15]  # as many blocks as the one with fewer has


def test_launch(make_llama):
    """A leader and a follower: preemption, abort, a refused request and a failed step leave them in step."""
    path, _ = make_llama()
    options = OPTIONS | {"num_blocks": 14, "enable_prefix_caching": False}
    alone = LLM(str(path), **options)
    expected = run(alone)
    llm = launch(str(path), tensor_parallel_size=2, **options)
    try:
        assert llm.parallel == TensorParallel(0, 2)
        assert llm.kv_cache.storage.size(4) == 1  # of two KV heads
        with pytest.raises(ValueError, match="the prompt is empty"):
            llm.add_request("empty", [])
        llm.add_request("gone", [1, 2, 3], SamplingParams(max_tokens=50))
        llm.step()
        assert llm.abort("gone") and not llm.abort("gone")
        nothing = SamplingParams(max_tokens=4, min_tokens=4, stop_token_ids=list(range(288)))
        with pytest.raises(StepError, match="all masked"):
            llm.generate([[1, 2, 3]], nothing)
        assert run(llm) == expected
        assert llm.stats().preempted > 0 and llm.stats().blocks_used == 0
    finally:
        llm.close()


def test_what_cannot_be_shared(make_llama):
    path, _ = make_llama()
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, expected so many processes joined"):
        LLM(str(path), **OPTIONS, tensor_parallel_size=2)
    config = model_config_from_hf(path)
    with pytest.raises(ValueError, match="4 query heads, 2 key/value heads .* cannot be shared by 3 processes"):
        TensorParallel(0, 3).local(config)


if __name__ == "__main__":
    member(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
