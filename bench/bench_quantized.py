"""The demo model's linear layers in the bits of its file against bfloat16 ones: time by rows, and what both cost in
accuracy.

    python -m bench.bench_quantized
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the engine sets it
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench.demo import demo_model
from engine_min import LLM, SamplingParams
from engine_min.llama import rms_norm, silu_and_mul

ROWS = (1, 2, 4, 8, 16, 32, 800)
TEXT = """The lighthouse stood at the end of a long stone pier, and every evening the keeper climbed its two hundred
steps to light the lamp. In winter the sea broke over the wall and salt ran down the windows, but the light was never
late. Ships that came home from the north looked for it first, before they saw the town or the church. When the old
keeper died, his daughter took the keys, and nobody in the harbour thought it strange. She kept a book in which she
wrote the weather, the names of the ships, and sometimes a line about the birds."""


def load(dtype: str, kept: bool = True) -> LLM:
    with patch("engine_min.llama.is_fast", lambda *_: kept and dtype == "bfloat16"):
        return LLM(str(demo_model()), dtype=dtype)


def logits(llm: LLM) -> torch.Tensor:
    """Of every position of the text, in float64."""
    states, model = [], llm.runner.model
    call = type(model).__call__

    def record(self, *args):
        states.append(call(self, *args))
        return states[-1]

    with patch.object(type(model), "__call__", record):
        llm.generate([llm.tokenizer.encode(TEXT)], SamplingParams(max_tokens=1, temperature=0))
    with torch.inference_mode():
        return model.logits(next(x for x in states if x.size(0) > 16)).double()


def accuracy(engines: dict[str, LLM]) -> None:
    exact = logits(load("float32"))
    print(
        f"against float32, {exact.size(0)} positions: logits, mean and largest divergence (nats), same likeliest token"
    )
    for name, llm in engines.items():
        rows = logits(llm)
        ours, theirs = exact.log_softmax(-1), rows.log_softmax(-1)
        divergence = (ours.exp() * (ours - theirs)).sum(-1)
        same = (rows.argmax(-1) == exact.argmax(-1)).double().mean()
        error = (rows - exact).norm() / exact.norm()
        print(f"{name:10} {error:8.2%} {divergence.mean():10.1e} {divergence.max():10.1e} {same:8.1%}")


def every_linear(llm: LLM, rows: int):
    """All layers' linears with their norms, activations and residuals, without attention; and the head."""
    model = llm.runner.model
    x = torch.randn(rows, model.config.hidden_size).bfloat16()
    last = x[:16].contiguous()

    def one_by_one():
        y = x
        for layer in model.layers:
            layer.qkv(rms_norm(y, layer.input_norm, layer.eps))
            y = layer.out(x, residual=y)
            y = layer.down(silu_and_mul(layer.gate_up(rms_norm(y, layer.post_norm, layer.eps))), residual=y)

    def chained():
        model.quantized_layers(x, lambda layer, qkv: x)

    return chained if model.quantized_layers is not None else one_by_one, lambda: model.logits(last)


def milliseconds(call, seconds: float = 0.5) -> float:
    """The median of as many calls as fit."""
    times, end = [], time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2] * 1e3


@torch.inference_mode()
def main() -> None:
    engines = {"kept": load("bfloat16"), "bfloat16": load("bfloat16", kept=False)}
    if engines["kept"].runner.model.quantized_layers is None:
        print("kept: left out, it needs AVX2 at least")
        return
    print("all layers, then the head of up to 16 rows, ms")
    print(f"{'rows':>6}" + "".join(f"{name:>18}" for name in engines))
    for rows in ROWS:
        figures = []
        for llm in engines.values():
            layers, head = every_linear(llm, rows)
            figures.append(f"{milliseconds(layers):9.2f} +{milliseconds(head):7.2f}")
        print(f"{rows:6}" + "".join(f"{figure:>18}" for figure in figures), flush=True)
    accuracy(engines)


if __name__ == "__main__":
    main()
