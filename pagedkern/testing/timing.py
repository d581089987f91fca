"""Median times and the bandwidth to hold them against."""

import statistics
import time
from collections.abc import Callable

import torch


def median_seconds(call: Callable[[], None], repeats: int = 20, warmup: int = 3, device: str = "cpu") -> float:
    """The median of `repeats` timed calls after `warmup` untimed ones; CUDA events on a CUDA device."""
    for _ in range(warmup):
        call()
    if torch.device(device).type == "cuda":
        return _median_cuda(call, repeats)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _median_cuda(call: Callable[[], None], repeats: int) -> float:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def copy_bandwidth(num_bytes: int = 1 << 28, device: str = "cpu") -> float:
    """Bytes a second of a plain copy, reads and writes counted, on all threads torch uses."""
    source = torch.ones(num_bytes // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_seconds(lambda: target.copy_(source), repeats=9, device=device)


def read_bandwidth(num_bytes: int = 1 << 28, device: str = "cpu") -> float:
    """Bytes a second of a plain sum over memory, on all threads torch uses."""
    source = torch.ones(num_bytes // 8, dtype=torch.int64, device=device)
    return num_bytes / median_seconds(lambda: source.sum(), repeats=9, device=device)
