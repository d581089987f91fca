"""Decode steps recorded once for each batch size of a list, and replayed on fixed buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch

Step = Callable[[], torch.Tensor]


def buckets_for(max_num_seqs: int) -> list[int]:
    """Batch sizes to record: few enough to record at start, near enough that little is padded. The last is the largest
    batch there can be."""
    sizes = [size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size < max_num_seqs]
    return [*sizes, max_num_seqs]


class StepGraphs:
    """`record(size)` gives a step that reads and writes nothing but fixed buffers, and returns its output, one more.

    On CUDA each step runs once, so that everything is loaded and allocated, and is then captured in a graph. Elsewhere
    the replay is the step itself, on the same buffers: what a graph would see, it sees.
    """

    def __init__(self, record: Callable[[int], Step], sizes: list[int], device: torch.device):
        self.sizes = sizes
        self.replays = dict.fromkeys(sizes, 0)  # how often each was replayed
        self._steps: dict[int, Step] = {}
        pool = None
        for size in reversed(sizes):  # the largest first: the others fit into its memory
            step = record(size)
            if device.type == "cuda":
                step, pool = _capture(step, pool)
            self._steps[size] = step

    def size_for(self, num_seqs: int) -> int:
        return next(size for size in self.sizes if size >= num_seqs)

    def replay(self, size: int) -> torch.Tensor:
        self.replays[size] += 1
        return self._steps[size]()


def _capture(step: Step, pool) -> tuple[Step, object]:
    """The graphs share a pool of memory, so an output is good until the next replay of any of them: whoever replays
    reads it before, as a step does that draws tokens from it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Errors of this thread only: those that watch NCCL, or serve requests, may ask CUDA what they like meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay, graph.pool()
