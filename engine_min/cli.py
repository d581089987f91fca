"""`pagedkern-engine`: a model answers prompts on the command line or over HTTP; and what that costs."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from textwrap import wrap

from engine_min.batching import LONGEST
from engine_min.config import DTYPES, EngineConfig
from engine_min.request import SamplingParams

SAMPLING = {"max_tokens": 256, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
ENGINE = [field for field in dataclasses.fields(EngineConfig) if field.name not in ("model", "kv_scales")]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pagedkern-engine", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = _command(commands, run_command, "answer one or several prompts, streaming")
    _add_engine_options(run)
    run.add_argument("--prompt", action="append", required=True, help="may be given several times: one batch")
    run.add_argument("--system", help="system message")
    run.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    for name, default in SAMPLING.items():
        run.add_argument(_flag(name), type=type(default), default=default)
    serve = _command(commands, serve_command, "an OpenAI-compatible HTTP server")
    _add_engine_options(serve)
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0: any free one")
    serve.add_argument("--served-model-name", help="what clients call the model (the path's last part)")
    serve.add_argument("--max-waiting", type=int, default=512, help="requests that may wait; more are refused (429)")
    serve.add_argument("--max-body-bytes", type=int, default=4 << 20, help="larger requests are refused (413)")
    serve.add_argument("--drain-seconds", type=int, default=60, help="how long running requests may take after SIGTERM")
    bench = _command(commands, bench_command, "static against continuous batching")
    _add_engine_options(bench, max_num_seqs=16)
    bench.add_argument("--requests", type=int, default=200, help="of the trace")
    bench.add_argument("--longest", type=int, default=LONGEST, help="most tokens of prompt and answer in the trace")
    bench.add_argument("--skip-example", action="store_true", help="the trace only")
    bench.add_argument("--plot", help="a PNG to write (needs matplotlib)")
    memory = _command(commands, memory_command, "bytes per token, blocks, how many sequences of which length fit")
    memory.add_argument("--model", required=True, help="config.json, Hugging Face directory or .gguf file")
    memory.add_argument("--memory-gib", type=float, default=80 * 0.9, help="for weights and cache (0.9 of 80)")
    memory.add_argument("--kv-cache-dtype", default="bfloat16", choices=DTYPES)
    memory.add_argument("--dynamic-scales", action="store_true", help="FP8 with a scale per token and head")
    memory.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args(argv)
    try:
        return args.function(args)
    except (ValueError, OSError) as error:
        print(f"pagedkern-engine: {error}", file=sys.stderr)
        return 2


def _command(commands, function, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(function.__name__.removesuffix("_command"), help=text)
    parser.set_defaults(function=function)
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_engine_options(parser: argparse.ArgumentParser, **defaults) -> None:
    """Those of EngineConfig."""
    parser.add_argument("--model", required=True, help="Hugging Face directory or .gguf file")
    for field in ENGINE:
        default = defaults.get(field.name, field.default)
        if field.type == "bool":
            parser.add_argument(_flag(field.name), action=argparse.BooleanOptionalAction, default=default)
        else:
            kind = {"str": str, "float": float}.get(field.type, int)
            parser.add_argument(_flag(field.name), type=kind, default=default)


def _load(args: argparse.Namespace, **options):
    from engine_min.launch import launch

    return launch(args.model, progress=True, **{field.name: getattr(args, field.name) for field in ENGINE} | options)


def serve_command(args: argparse.Namespace) -> int:
    from engine_min.server.main import serve

    name = args.served_model_name or Path(args.model).name
    serve(_load(args), name, args.host, args.port, args.drain_seconds, max_waiting=args.max_waiting,
          max_body_bytes=args.max_body_bytes)  # fmt: skip
    return 0


def bench_command(args: argparse.Namespace) -> int:
    from engine_min import batching

    llm = _load(args, enable_prefix_caching=False)  # or the second run would find the prompts of the first
    vocab = llm.model_config.vocab_size
    jobs = {} if args.skip_example else {"four requests": batching.example_jobs(vocab)}
    jobs[f"{args.requests} requests"] = batching.trace_jobs(vocab, args.requests, args.longest)
    results = {}
    for title, some in jobs.items():
        results[title] = batching.compare(llm, some)
        print(batching.table(title, results[title]) + "\n", flush=True)
    if args.plot:
        batching.plot(results, args.plot)
    return 0


def memory_command(args: argparse.Namespace) -> int:
    from engine_min.memory import report

    print(report(args.model, args.kv_cache_dtype, args.block_size, args.memory_gib, args.dynamic_scales))
    return 0


def run_command(args: argparse.Namespace) -> int:
    llm = _load(args)
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
    return 0


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
