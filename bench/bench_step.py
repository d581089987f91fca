"""What a decode step costs outside the model: scheduling, metadata, bookkeeping, text.

    python -m bench.bench_step [--sequences 256] [--steps 200]

The demo model's tokenizer and vocabulary; the network is replaced by one that returns prepared logits at once. Medians
and minima over the steps, in microseconds. "sampling" is the sampler's tensor work on [sequences, vocabulary] logits
(greedy), and no part of the sum.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

PROMPT = 100  # tokens, different for each sequence


class Clock:
    """Adds up the time inside the functions it wraps."""

    def __init__(self):
        self.spent: dict[str, float] = {}

    def wrap(self, owner, attribute: str, name: str) -> None:
        inner = getattr(owner, attribute)

        def timed(*args, **kwargs):
            started = time.perf_counter()
            result = inner(*args, **kwargs)
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - started
            return result

        setattr(owner, attribute, timed)


class PreparedModel:
    """Token ids that are text, a different one for each sequence and step."""

    def __init__(self, llm, num_seqs: int):
        vocab = llm.model_config.vocab_size
        self.hidden = torch.zeros(num_seqs, 8)
        self.all_logits = [torch.zeros(num_seqs, vocab, dtype=torch.bfloat16) for _ in range(8)]
        for step, logits in enumerate(self.all_logits):
            logits[torch.arange(num_seqs), 1000 + (torch.arange(num_seqs) * 131 + step * 17) % (vocab - 2000)] = 1.0
        self.calls = 0

    def __call__(self, token_ids, attention):
        return self.hidden if token_ids.size(0) <= self.hidden.size(0) else torch.zeros(token_ids.size(0), 8)

    def logits(self, hidden):
        self.calls += 1
        return self.all_logits[self.calls % 8][: hidden.size(0)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", help="the demo model where none is given")
    args = parser.parse_args()

    from bench.demo import demo_model
    from engine_min import LLM, SamplingParams, runner

    model, num_seqs = args.model or str(demo_model()), args.sequences
    llm = LLM(model, max_num_seqs=num_seqs, num_blocks=num_seqs * 40, max_num_batched_tokens=max(2048, num_seqs))
    llm.runner.model = PreparedModel(llm, num_seqs)
    params = SamplingParams(max_tokens=args.steps + 20, temperature=0, ignore_eos=True)
    for i in range(num_seqs):
        llm.add_request(str(i), [(i * 7 + j * 3) % 40000 + 100 for j in range(PROMPT)], params)
    while llm.stats().waiting or any(r.num_pending > 1 for r in llm.scheduler.running):
        llm.step()

    clock = Clock()
    clock.wrap(llm.scheduler, "schedule", "schedule")
    clock.wrap(llm.runner, "_fill", "metadata")
    clock.wrap(llm, "_commit", "commit")
    clock.wrap(runner, "sample", "sampling")
    rows: dict[str, list[float]] = {}
    for _ in range(args.steps):
        clock.spent.clear()
        started = time.perf_counter()
        outputs = llm.step()
        total = time.perf_counter() - started
        assert len(outputs) == num_seqs
        sampling = clock.spent.pop("sampling")
        outside = total - sampling
        rest = {"tokens, text, the rest": outside - sum(clock.spent.values()), "all": outside, "sampling": sampling}
        step = clock.spent | rest
        for name, seconds in step.items():
            rows.setdefault(name, []).append(1e6 * seconds)
    print(f"| {num_seqs} sequences, one decode step | median us | least us |\n|---|---|---|")
    for name, values in rows.items():
        print(f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
