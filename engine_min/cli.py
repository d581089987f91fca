"""`pagedkern-engine`: a model answers prompts on the command line or over HTTP; and what that costs."""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from textwrap import wrap

from engine_min import memory
from engine_min.bench import batching
from engine_min.config import EngineConfig
from engine_min.engine import LLM
from engine_min.launch import launch
from engine_min.request import SamplingParams
from engine_min.server import command as server

SAMPLING = {"max_tokens": 256, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
ENGINE = [field for field in dataclasses.fields(EngineConfig) if field.name not in ("model", "kv_scales")]


def main(argv: list[str] | None = None) -> int:
    commands = {
        "run": ("answer one or several prompts, streaming", add_run_options, run),
        "serve": ("an OpenAI-compatible HTTP server", server.add_options, server.command),
        "bench": ("static against continuous batching", batching.add_options, batching.command),
        "memory": ("bytes per token, how many sequences of which length fit", memory.add_options, memory.command),
    }
    parser = argparse.ArgumentParser(prog="pagedkern-engine", description=__doc__)
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, (text, add_options, function) in commands.items():
        command = parsers.add_parser(name, help=text)
        if name != "memory":
            add_engine_options(command)
        add_options(command)
        command.set_defaults(function=function)
    args = parser.parse_args(argv)
    try:
        args.function(args, load)
    except (ValueError, OSError) as error:
        print(f"pagedkern-engine: {error}", file=sys.stderr)
        return 2
    return 0


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Those of EngineConfig."""
    parser.add_argument("--model", required=True, help="Hugging Face directory or .gguf file")
    for field in ENGINE:
        if field.type is bool:
            parser.add_argument(_flag(field.name), action=argparse.BooleanOptionalAction, default=field.default)
        else:
            kind = field.type if field.type in (str, float) else int
            parser.add_argument(_flag(field.name), type=kind, default=field.default)


def load(args: argparse.Namespace, **options) -> LLM:
    """The engine that the options ask for."""
    return launch(args.model, **{field.name: getattr(args, field.name) for field in ENGINE} | options)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", required=True, help="may be given several times: one batch")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    for name, default in SAMPLING.items():
        parser.add_argument(_flag(name), type=type(default), default=default)


def run(args: argparse.Namespace, load: Callable[..., LLM]) -> None:
    llm = load(args)
    params = SamplingParams(**{name: getattr(args, name) for name in SAMPLING})
    system = [{"role": "system", "content": args.system}] if args.system else []
    printer = StreamPrinter(len(args.prompt))
    for i, prompt in enumerate(args.prompt):
        if not args.raw and llm.tokenizer.chat_template is not None:
            prompt = llm.tokenizer.apply_chat_template([*system, {"role": "user", "content": prompt}])
        llm.add_request(str(i), prompt, params)
    while llm.has_unfinished():
        for output in llm.step():
            printer.show(int(output.request_id), output.outputs[0].new_text, output.finished)


class StreamPrinter:
    """One stream is printed as it comes, several in lines under their numbers, each as soon as it is full."""

    def __init__(self, num_streams: int, width: int = 100):
        self._width = width
        self._pending = [""] * num_streams

    def show(self, stream: int, text: str, finished: bool) -> None:
        if len(self._pending) == 1:
            print(text, end="\n" if finished else "", flush=True)
            return
        text = self._pending[stream] + text
        lines = [part for line in text.split("\n") for part in wrap(line, self._width, drop_whitespace=False) or [""]]
        self._pending[stream] = "" if finished else lines.pop()
        for line in filter(str.strip, lines):
            print(f"[{stream}] {line.rstrip()}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
