"""`pagedkern-engine`: a model answers prompts on the command line or over HTTP; and what that costs."""

import argparse
import dataclasses
import sys
from collections.abc import Callable

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


def _add(parser: argparse.ArgumentParser, name: str, **options) -> None:
    parser.add_argument("--" + name.replace("_", "-"), **options)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Those of EngineConfig."""
    parser.add_argument("--model", required=True, help="Hugging Face directory or .gguf file")
    for field in ENGINE:
        kind = {"type": field.type if field.type in (str, float) else int}
        if field.type is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        _add(parser, field.name, default=field.default, **kind)


def load(args: argparse.Namespace, **options) -> LLM:
    """The engine that the options ask for."""
    return launch(args.model, **{field.name: getattr(args, field.name) for field in ENGINE} | options)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", required=True, help="may be given several times: one batch")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    for name, default in SAMPLING.items():
        _add(parser, name, type=type(default), default=default)


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
    """One stream is printed as it comes, several line by line under their numbers."""

    def __init__(self, num_streams: int):
        self._pending = [""] * num_streams

    def show(self, stream: int, text: str, finished: bool) -> None:
        text += "\n" * finished
        if len(self._pending) == 1:
            print(text, end="", flush=True)
            return
        *lines, self._pending[stream] = (self._pending[stream] + text).split("\n")
        for line in filter(str.strip, lines):
            print(f"[{stream}] {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
