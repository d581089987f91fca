"""What an FP8 KV cache costs in accuracy on the demo model: every kind of scale against the bfloat16 cache.

    python -m bench.bench_fp8

Perplexity of bench/prose.txt, read as one prompt; the mean distance of its tokens' log probabilities from those with a
bfloat16 cache; how often the likeliest token is the same; and, of eight greedy continuations of 48 tokens, how many
tokens agree before the first that differs. Static scales come from the text's first third, read once with dynamic ones.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch

PROMPTS = 8
NEW_TOKENS = 48
FORMATS = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


class Reader:
    """One engine after another reads the same text and continues the same beginnings."""

    def __init__(self, model: str, text: str):
        self.model, self.text = model, text

    def engine(self, **options):
        from engine_min import LLM

        return LLM(self.model, dtype="bfloat16", num_blocks=256, max_num_seqs=16, **options)

    def calibrate(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each layer, the largest key and value of each head in the first third of the text."""
        from engine_min import SamplingParams

        llm = self.engine(kv_cache_dtype="fp8_e4m3")
        ids = llm.tokenizer.encode(self.text)
        llm.generate([ids[: len(ids) // 3]], SamplingParams(max_tokens=1))
        blocks = [entry.block for entry in llm.blocks.prefix.entries.values()]
        largest = FORMATS["fp8_e4m3"]
        return [tuple(side[blocks].amax((0, 1)) * largest for side in pair) for pair in llm.kv_cache.scales]

    def read(self, **options) -> tuple[torch.Tensor, list[int], list[list[int]]]:
        """(log probability of each token, the likeliest token at each place, the continuations)"""
        from engine_min import SamplingParams

        llm = self.engine(**options)
        ids = llm.tokenizer.encode(self.text)
        (output,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1))
        found = output.prompt_logprobs[1:]
        own = torch.tensor([places[token] for places, token in zip(found, ids[1:], strict=True)])
        best = [max(places, key=places.get) for places in found]
        step = len(ids) // (PROMPTS + 1)
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        outputs = llm.generate([ids[: step * (i + 1)] for i in range(PROMPTS)], params)
        return own, best, [output.outputs[0].token_ids for output in outputs]


def scale_kinds(amax: list[tuple[torch.Tensor, torch.Tensor]], largest: float) -> dict:
    keys, values = (torch.stack(side) / largest for side in zip(*amax, strict=True))
    per_layer = tuple(side.amax(1, keepdim=True) for side in (keys, values))
    return {
        "1": 1.0,
        "static, per layer": per_layer,
        "static, per head": (keys, values),
        "dynamic, per token and head": "dynamic",
    }


def agreement(tokens: list[list[int]], expected: list[list[int]]) -> float:
    """Tokens before the first that differs."""
    lengths = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        for one, other in zip(tokens, expected, strict=True)
    ]
    return sum(lengths) / len(lengths)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="the demo model where none is given")
    parser.add_argument("--text", type=Path, default=Path(__file__).with_name("prose.txt"))
    args = parser.parse_args()

    from bench.demo import demo_model

    reader = Reader(args.model or str(demo_model()), args.text.read_text())
    baseline, best, continuations = reader.read()
    print(f"{len(best) + 1} tokens\n")
    distance, same = "log probability, mean distance", "likeliest token the same"
    print(f"| cache | scales | perplexity | {distance} | {same} | greedy, of {NEW_TOKENS} |")
    print("|---|---|---|---|---|---|")
    print(f"| bfloat16 | | {math.exp(-baseline.mean()):.3f} | | | |")
    amax = reader.calibrate()
    for name, largest in FORMATS.items():
        for kind, scales in scale_kinds(amax, largest).items():
            own, likeliest, tokens = reader.read(kv_cache_dtype=name, kv_scales=scales)
            same = sum(a == b for a, b in zip(likeliest, best, strict=True)) / len(best)
            print(
                f"| {name} | {kind} | {math.exp(-own.mean()):.3f} | {(own - baseline).abs().mean():.4f} | "
                f"{100 * same:.1f} % | {agreement(tokens, continuations):.1f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
