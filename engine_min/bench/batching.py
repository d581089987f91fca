"""`pagedkern-engine bench`: static against continuous batching, the same model, prompts and numbers of tokens.

A static batch is filled once and runs until its longest sequence is done: a sequence that has ended stays in it as
padding that is computed, and every slot reserves the cache of the longest. Continuous batching gives a slot to the next
request in the step after it was left, and a block of cache to whom it serves.
"""

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_min.engine import LLM
from engine_min.request import RequestOutput, SamplingParams

EXAMPLE = (50, 120, 240, 1024)  # tokens of four requests that start together
LONGEST = 768  # tokens of prompt and answer in the trace
COLUMNS = ("tokens", "seconds", "tokens/s", "steps", "bubbles", "KV waste", "first p50", "p50 s", "p90 s", "p99 s")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(max_num_seqs=16)
    parser.add_argument("--requests", type=int, default=200, help="of the trace")
    parser.add_argument("--longest", type=int, default=LONGEST, help="most tokens of prompt and answer in the trace")
    parser.add_argument("--skip-example", action="store_true", help="the trace only")
    parser.add_argument("--plot", help="a PNG to write (needs matplotlib)")


def command(args: argparse.Namespace, load: Callable[..., LLM]) -> None:
    for option, least in (("requests", 1), ("longest", 16)):
        if getattr(args, option) < least:
            raise ValueError(f"{option} is {getattr(args, option)}, expected at least {least}")
    llm = load(args, enable_prefix_caching=False)  # or the second run would find the prompts of the first
    vocab = llm.model_config.vocab_size
    jobs = {} if args.skip_example else {"four requests": example_jobs(vocab)}
    jobs[f"{args.requests} requests"] = trace_jobs(vocab, args.requests, args.longest)
    results = {}
    for title, some in jobs.items():
        results[title] = compare(llm, some)
        print(table(title, results[title]) + "\n", flush=True)
    if args.plot:
        plot(results, args.plot)


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    num_tokens: int

    @property
    def length(self) -> int:
        return len(self.prompt) + self.num_tokens


@dataclass
class Run:
    """What one way of batching made of the jobs. Cache and slots are summed over steps."""

    name: str
    started: float = field(default_factory=time.perf_counter)
    jobs: dict[str, tuple[Job, RequestOutput]] = field(default_factory=dict)
    useful: int = 0  # tokens that somebody asked for
    bubbles: int = 0  # slot-iterations of sequences that had ended, or of empty slots while requests waited
    reserved: int = 0  # tokens' worth of cache that was taken
    filled: int = 0  # and that held a token of a sequence still running
    busy: list[int] = field(default_factory=list)  # sequences of each step that had not ended
    times: list[float] = field(default_factory=list)  # when each step was done
    first: list[float] = field(default_factory=list)  # start to first token, of each request
    latencies: list[float] = field(default_factory=list)  # start to last token

    @property
    def steps(self) -> int:
        return len(self.times)

    @property
    def seconds(self) -> float:
        return self.latencies[-1]

    @property
    def waste(self) -> float:
        return 1 - self.filled / max(1, self.reserved)

    def row(self) -> list[str]:
        figures = [percentile(self.first, 50), *(percentile(self.latencies, p) for p in (50, 90, 99))]
        return [
            str(self.useful), f"{self.seconds:.2f}", f"{self.useful / self.seconds:.1f}", str(self.steps),
            str(self.bubbles), f"{100 * self.waste:.1f} %", *(f"{figure:.2f}" for figure in figures),
        ]  # fmt: skip

    def add(self, llm: LLM, job: Job, num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        name = f"{self.name}-{len(self.jobs)}"
        self.jobs[name] = job, llm.add_request(name, job.prompt, params)

    def step(self, llm: LLM) -> tuple[int, int]:
        """(sequences that were in the step, those of them that had ended before it)."""
        outputs = llm.step()
        now = time.perf_counter() - self.started
        ended = 0
        for output in outputs:
            count, wanted = len(output.outputs[0].token_ids), self.jobs[output.request_id][0].num_tokens
            ended += count > wanted
            self.useful += count <= wanted
            self.first += [now] * (count == 1)
            self.latencies += [now] * (count == wanted)
        present = llm.stats().running + sum(output.finished for output in outputs)
        self.times.append(now)
        self.busy.append(present - ended)
        return present, ended


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


def example_jobs(vocab: int) -> list[Job]:
    return [Job(_prompt(random.Random(i), 16, vocab), count) for i, count in enumerate(EXAMPLE)]


def trace_jobs(vocab: int, count: int, longest: int, seed: int = 0) -> list[Job]:
    """Lengths as chats have them: many short ones and a few long ones, prompt and answer up to half of `longest`."""
    rng = random.Random(seed)

    def length() -> int:
        return max(4, min(longest // 2, round(rng.lognormvariate(math.log(longest / 8), 0.8))))

    lengths = [(length(), length()) for _ in range(count)]  # the same for every vocabulary
    return [Job(_prompt(rng, prompt, vocab), num_tokens) for prompt, num_tokens in lengths]


def _prompt(rng: random.Random, length: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(length)]


def run_static(llm: LLM, jobs: list[Job], slots: int) -> Run:
    run = Run("static")
    for begin in range(0, len(jobs), slots):
        group = jobs[begin : begin + slots]
        for job in group:
            run.add(llm, job, max(job.num_tokens for job in group))
        while llm.has_unfinished():
            _, ended = run.step(llm)
            run.bubbles += ended
            run.reserved += len(group) * max(job.length for job in group)
            for job, output in run.jobs.values():
                count = len(output.outputs[0].token_ids)
                run.filled += (len(job.prompt) + count) * (count < job.num_tokens)
    return run


def run_continuous(llm: LLM, jobs: list[Job], slots: int) -> Run:
    run = Run("continuous")
    for job in jobs:
        run.add(llm, job, job.num_tokens)
    while llm.has_unfinished():
        present, _ = run.step(llm)
        stats = llm.stats()
        run.bubbles += slots - present if stats.waiting else 0
        run.reserved += stats.blocks_used * llm.blocks.block_size
        run.filled += sum(request.num_computed for request in llm.scheduler.running)
    return run


def compare(llm: LLM, jobs: list[Job]) -> list[Run]:
    """Both ways, with as many slots as the engine has, after a few steps to warm up."""
    slots = llm.config.max_num_seqs
    warm_up = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    llm.generate([job.prompt for job in jobs[:slots]], warm_up)
    return [run_static(llm, jobs, slots), run_continuous(llm, jobs, slots)]


def table(title: str, runs: list[Run]) -> str:
    rows = [[title, *COLUMNS], *([run.name, *run.row()] for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    static, continuous = runs
    gain = (continuous.useful / continuous.seconds) / (static.useful / static.seconds)
    return "\n".join([*lines, f"continuous over static: {gain:.2f} times the tokens/s"])


def plot(results: dict[str, list[Run]], path: str) -> None:
    """Sequences at work over time, and how long requests took."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(results), 2, figsize=(11, 3.6 * len(results)), squeeze=False)
    for (title, runs), (work, wait) in zip(results.items(), axes, strict=True):
        for run in runs:
            work.step(run.times, run.busy, where="pre", label=run.name)
            shares = [100 * (i + 1) / len(run.latencies) for i in range(len(run.latencies))]
            wait.step(sorted(run.latencies), shares, where="post", label=run.name)
        work.set(title=f"{title}: sequences at work", xlabel="seconds", ylabel="sequences", ylim=(0, None))
        wait.set(title=f"{title}: requests done", xlabel="seconds since start", ylabel="%", ylim=(0, 100))
        work.legend()
        wait.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
