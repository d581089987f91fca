"""PAGEDKERN_LOG=1: the configuration each op call runs with, one line to stderr, once per shape."""

import sys

from ._library import switch

_seen = set()


def is_enabled() -> bool:
    """Whether the log is on: PAGEDKERN_LOG, or the last `enable`."""
    return bool(switch("pagedkern_log", -1))


def enable(enabled: bool = True) -> None:
    """Turns the log on or off for the whole process."""
    switch("pagedkern_log", int(bool(enabled)))


def config(op: str, **facts) -> None:
    """Logs the configuration a backend written in Python chose for `op`, once per different line."""
    if not is_enabled():
        return
    line = f"pagedkern: {op}: " + ", ".join(f"{name} {value}" for name, value in facts.items())
    if line not in _seen:
        _seen.add(line)
        print(line, file=sys.stderr, flush=True)
