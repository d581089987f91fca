"""The options of `pagedkern-engine serve`. What serves is imported when it is asked for: it needs more packages."""

import argparse
from collections.abc import Callable
from pathlib import Path

from engine_min.engine import LLM


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--served-model-name", help="what clients call the model (the path's last part)")
    parser.add_argument("--max-waiting", type=int, default=512, help="requests that may wait; more are refused (429)")
    parser.add_argument("--max-body-bytes", type=int, default=4 << 20, help="larger requests are refused (413)")
    parser.add_argument(
        "--drain-seconds", type=int, default=60, help="how long running requests may take after SIGTERM"
    )


def command(args: argparse.Namespace, load: Callable[..., LLM]) -> None:
    from engine_min.server.main import serve

    if not 0 <= args.port <= 65535:
        raise ValueError(f"port is {args.port}, expected one in [0, 65535]")
    for option, least in (("max_waiting", 0), ("max_body_bytes", 1), ("drain_seconds", 0)):
        if getattr(args, option) < least:
            raise ValueError(f"{option} is {getattr(args, option)}, expected at least {least}")
    name = args.served_model_name or Path(args.model).name
    limits = dict(max_waiting=args.max_waiting, max_body_bytes=args.max_body_bytes)
    serve(load(args), name, args.host, args.port, args.drain_seconds, **limits)
