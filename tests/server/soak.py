"""Many clients at once, a third of the requests cut off: no leak, no error but those asked for.

python tests/server/soak.py --seconds 600 --clients 32
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import openai

PROMPTS = ["The sea.", "A", "Somewhat longer than the others, this one, by far. " * 2, "ü🙂", "x" * 100]


class Client:
    """Asks for one thing after the other until the time is up; `report` counts what came of it, by kind."""

    def __init__(self, url: str, number: int, report: Counter, answers: dict):
        self._api = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=600)
        self._random = random.Random(number)
        self._report = report
        self._answers = answers  # text by what was asked for: a greedy answer never changes

    async def run(self, deadline: float) -> None:
        actions = [self._whole, self._stream, self._chat, self._bad] + [self._cut, self._cut_before_answer]
        while time.monotonic() < deadline:
            action = self._random.choice(actions)
            try:
                await action()
                self._report[action.__name__] += 1
            except Exception as error:
                self._report[f"ERROR in {action.__name__}: {error!r}"] += 1
        await self._api.close()

    def _options(self) -> dict:
        prompt, tokens = self._random.choice(PROMPTS), self._random.choice([1, 5, 30, 60])
        extra = {"ignore_eos": True}
        return dict(model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, extra_body=extra)

    def _compare(self, options: dict, text: str) -> None:
        key = options["prompt"], options["max_tokens"]
        if self._answers.setdefault(key, text) != text:
            raise AssertionError(f"{key} was answered {self._answers[key]!r}, now {text!r}")

    async def _whole(self) -> None:
        options = self._options()
        answer = await self._api.completions.create(**options)
        self._compare(options, answer.choices[0].text)

    async def _stream(self) -> None:
        options = self._options()
        text = ""
        async for chunk in await self._api.completions.create(**options, stream=True):
            text += chunk.choices[0].text
        self._compare(options, text)

    async def _chat(self) -> None:
        messages = [{"role": "user", "content": self._random.choice(PROMPTS)}]
        tokens = self._random.randint(1, 40)
        answer = await self._api.chat.completions.create(
            model="tiny", messages=messages, max_tokens=tokens, seed=self._random.randint(0, 99), stop=["q", "zz"],
            logprobs=True, top_logprobs=3, presence_penalty=0.5, extra_body={"top_k": 40, "min_p": 0.01},
        )  # fmt: skip
        if not 1 <= len(answer.choices[0].logprobs.content) <= tokens:
            raise AssertionError(f"{len(answer.choices[0].logprobs.content)} logprobs of at most {tokens} tokens")

    async def _bad(self) -> None:
        wrong = self._random.choice([{"prompt": ""}, {"max_tokens": 10**6}, {"top_p": 7}, {"prompt": [999]}])
        try:
            await self._api.completions.create(**(self._options() | wrong))
        except openai.BadRequestError:
            return
        raise AssertionError(f"{wrong} was answered")

    async def _cut(self) -> None:
        options = self._options() | {"max_tokens": 60}
        stream = await self._api.completions.create(**options, stream=True)
        left = self._random.randint(0, 5)
        async for _ in stream:
            left -= 1
            if left < 0:
                break
        await stream.close()

    async def _cut_before_answer(self) -> None:
        task = asyncio.ensure_future(self._api.completions.create(**(self._options() | {"max_tokens": 60})))
        await asyncio.sleep(self._random.random() / 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def usage() -> tuple[int, int]:
    """Resident MiB and open files of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20, len(os.listdir("/proc/self/fd"))


async def _run(url: str, seconds: float, num_clients: int) -> tuple[Counter, list[tuple[int, int]]]:
    report, answers, usages = Counter(), {}, []
    deadline = time.monotonic() + seconds

    async def watch() -> None:
        while time.monotonic() < deadline:
            await asyncio.sleep(seconds / 20)
            usages.append(usage())

    clients = [Client(url, number, report, answers).run(deadline) for number in range(num_clients)]
    await asyncio.gather(watch(), *clients)
    return report, usages


def soak(server, seconds: float, num_clients: int) -> Counter:
    """Runs the clients against a RunningServer and looks for what they left behind."""
    report, usages = asyncio.run(_run(server.url, seconds, num_clients))
    server.wait_idle()
    server.llm.blocks.check_integrity()
    if server.server.engine._streams:
        report["ERROR: streams are left"] += len(server.server.engine._streams)
    early, late = usages[len(usages) // 4], usages[-1]
    print("MiB and open files:", *usages)
    if late[0] > early[0] * 1.1 + 20:
        report[f"ERROR: memory grew from {early[0]} to {late[0]} MiB"] += 1
    if late[1] > early[1] + 2 * num_clients:
        report[f"ERROR: open files grew from {early[1]} to {late[1]}"] += 1
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=32)
    args = parser.parse_args()
    tests = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(tests / "server"), str(tests / "engine"), str(tests.parent)]
    from checkpoints import write_checkpoint
    from running import TEMPLATE, RunningServer

    from engine_min import LLM

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), chat_template=TEMPLATE)
        # Few blocks: preemptions belong to it. Few rows a step: oneDNN keeps up to 1024 primitives, one for each number
        # of rows and linear, and until it has them all that looks like a leak.
        options = dict(dtype="float32", num_blocks=24, max_num_seqs=16, max_num_batched_tokens=24, max_model_len=256)
        server = RunningServer(LLM(folder, **options))
        report = soak(server, args.seconds, args.clients)
        print(server.llm.stats())
        server.close()
    for name, count in sorted(report.items()):
        print(f"{count:8} {name}")
    return int(any(name.startswith("ERROR") for name in report))


if __name__ == "__main__":
    sys.exit(main())
