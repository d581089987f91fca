"""Turns the scheduled requests into one forward pass on fixed metadata buffers."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from engine_min.attention import Attention, Batch
from engine_min.block_manager import BlockManager
from engine_min.config import EngineConfig
from engine_min.request import Request
from engine_min.sampler import logprobs_of, sample

Step = Callable[[], torch.Tensor]  # reads and writes nothing but fixed buffers, and returns its output, one more
NO_SLOT = -1
LOGPROB_ROWS = 64  # of a prompt at a time: logits of a whole prompt would take more memory than its cache


class Runner:
    """The buffers are allocated once and filled in place, so that a recorded step sees the new values.

    A batch in which every sequence has one token is padded to a recorded size: padding rows have no keys (seq_len 0)
    and no slot (-1). Any other batch runs as it is.
    """

    def __init__(self, config: EngineConfig, model, attention: Attention, blocks: BlockManager, device: torch.device):
        self.model = model
        self.attention = attention
        self.blocks = blocks
        self.max_model_len = config.max_model_len
        self.device = device
        max_num_seqs, max_blocks = blocks.tables.shape
        num_tokens = config.max_num_batched_tokens
        self._token_ids, self._positions, self._slots = (_Buffer(num_tokens, torch.int64, device) for _ in range(3))
        self._seq_lens = _Buffer(max_num_seqs, torch.int32, device)
        self._cu_seqlens = _Buffer(max_num_seqs + 1, torch.int32, device)
        self._block_table = _Buffer((max_num_seqs, max_blocks), torch.int32, device)
        self._uploaded = torch.cuda.Event() if device.type == "cuda" else None
        self.graphs = None
        if not config.enforce_eager:
            self.record()

    @torch.inference_mode()
    def record(self) -> None:
        """Records the decode steps. They see padding only: on a GPU they run once, and must not write anywhere."""
        max_num_seqs = self.blocks.tables.shape[0]
        self._pad(0, max_num_seqs)
        self._upload(max_num_seqs, max_num_seqs)
        self.graphs = StepGraphs(self._recorded_step, buckets_for(max_num_seqs), self.device)

    def _recorded_step(self, size: int) -> Step:
        """Whatever changes from step to step is in the buffers; lengths and table widths are upper bounds."""
        return partial(self._forward, self._batch(size, size, self._block_table.device.size(1), 1, self.max_model_len))

    def _batch(self, num_tokens: int, num_seqs: int, width: int, max_q: int, max_k: int) -> Batch:
        return Batch(
            self._token_ids.device[:num_tokens], self._positions.device[:num_tokens], self._slots.device[:num_tokens],
            self._block_table.device[:num_seqs, :width], self._seq_lens.device[:num_seqs],
            self._cu_seqlens.device[: num_seqs + 1] if max_q > 1 else None, max_q, max_k,
        )  # fmt: skip

    def _forward(self, batch: Batch) -> torch.Tensor:
        self.attention.begin(batch)
        return self.model(batch.token_ids, self.attention)

    @torch.inference_mode()
    def step(self, requests: list[Request]) -> list[tuple[Request, int | None]]:
        """Runs what is scheduled. A token (None: the logits were unusable) for each request that samples."""
        num_tokens = sum([request.num_scheduled for request in requests])
        hidden = self._run(requests, num_tokens)
        rows: list[int] = []
        drawing: list[Request] = []
        end = 0
        for request in requests:
            end += request.num_scheduled
            if request.params.prompt_logprobs is not None:
                self._report_prompt(request, hidden[end - request.num_scheduled : end])
            if request.samples:
                rows.append(end - 1)
                drawing.append(request)
        if not drawing:
            return []
        hidden = hidden[:num_tokens] if len(rows) == num_tokens else hidden[torch.tensor(rows, device=self.device)]
        return list(zip(drawing, sample(self.model.logits(hidden), drawing), strict=True))

    def _run(self, requests: list[Request], num_tokens: int) -> torch.Tensor:
        num_seqs = len(requests)
        is_decode = num_tokens == num_seqs
        longest = self._fill(requests, num_tokens, is_decode)
        if self.graphs is not None and is_decode:
            size = self.graphs.size_for(num_seqs)
            self._pad(num_seqs, size)
            self._upload(size, size)
            return self.graphs.replay(size)
        self._upload(num_tokens, num_seqs)
        max_q = 1 if is_decode else max([request.num_scheduled for request in requests])
        return self._forward(self._batch(num_tokens, num_seqs, self.blocks.blocks_for(longest), max_q, longest))

    def _fill(self, requests: list[Request], num_tokens: int, is_decode: bool) -> int:
        """Fills the host side of the buffers; the length of the longest sequence."""
        if self._uploaded is not None:  # a step that draws nothing does not wait for its own upload
            self._uploaded.synchronize()
        num_seqs, block_size, tables = len(requests), self.blocks.block_size, self.blocks.tables
        starts = [request.num_computed for request in requests]
        rows = np.array([request.row for request in requests])
        positions, seq_lens = self._positions.host[:num_tokens], self._seq_lens.host[:num_seqs]
        if is_decode:
            ids = [request.tokens[start] for request, start in zip(requests, starts, strict=True)]
            positions[:] = starts
            np.add(positions, 1, out=seq_lens, casting="unsafe")
            row_of_token = rows
        else:
            ids = []
            for request, start in zip(requests, starts, strict=True):
                ids += request.tokens[start : start + request.num_scheduled]
            counts = np.array([request.num_scheduled for request in requests])
            ends = self._cu_seqlens.host[1 : num_seqs + 1]
            ends[:] = np.cumsum(counts)
            seq_lens[:] = starts + counts
            np.add(np.arange(num_tokens), np.repeat(seq_lens - ends, counts), out=positions)
            row_of_token = np.repeat(rows, counts)
        self._token_ids.host[:num_tokens] = ids

        longest = int(seq_lens.max())
        width = self.blocks.blocks_for(longest)
        self._block_table.host[:num_seqs, :width] = tables[rows, :width]
        columns, offsets = np.divmod(positions, block_size)
        slots = self._slots.host[:num_tokens]
        np.multiply(tables[row_of_token, columns], block_size, out=slots, dtype=np.int64)
        slots += offsets
        for i, request in enumerate(requests):  # found in the prefix cache, shared with others: only logits are wanted
            if request.num_stored > starts[i]:
                first = i if is_decode else ends[i] - request.num_scheduled
                slots[first : first + request.num_stored - starts[i]] = NO_SLOT
        return longest

    def _pad(self, start: int, end: int) -> None:
        for buffer in (self._token_ids, self._positions, self._seq_lens):
            buffer.host[start:end] = 0
        self._slots.host[start:end] = NO_SLOT

    def _upload(self, num_tokens: int, num_seqs: int) -> None:
        for buffer in (self._token_ids, self._positions, self._slots):
            buffer.upload(num_tokens)
        for buffer in (self._seq_lens, self._block_table):
            buffer.upload(num_seqs)
        self._cu_seqlens.upload(num_seqs + 1)
        if self._uploaded is not None:
            self._uploaded.record()

    def _report_prompt(self, request: Request, hidden: torch.Tensor) -> None:
        """Adds the log probabilities of the prompt's tokens that follow those computed."""
        found, prompt, start = request.output.prompt_logprobs, request.prompt_token_ids, request.num_computed
        end = min(len(hidden), len(prompt) - 1 - start)
        first = max(0, len(found) - 1 - start)  # where an earlier run of a preempted request got to
        for begin in range(first, end, LOGPROB_ROWS):
            rows = hidden[begin : min(begin + LOGPROB_ROWS, end)]
            tokens = prompt[start + begin + 1 : start + begin + 1 + len(rows)]
            found += logprobs_of(self.model.logits(rows), tokens, [request.params.prompt_logprobs] * len(rows))


class _Buffer:
    """A fixed tensor on the device, and the memory on the host that fills it: on the CPU the same memory, seen through
    numpy, which fills it in a tenth of the time."""

    def __init__(self, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device):
        on_host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: np.ndarray = on_host.numpy()
        self.device = on_host.to(device)
        self._source = on_host if device.type != "cpu" else None

    def upload(self, count: int) -> None:
        if self._source is not None:
            self.device[:count].copy_(self._source[:count], non_blocking=True)


def buckets_for(max_num_seqs: int) -> list[int]:
    """Batch sizes to record: few enough to record at start, near enough that little is padded. The last is the largest
    batch there can be."""
    sizes = [size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size < max_num_seqs]
    return [*sizes, max_num_seqs]


class StepGraphs:
    """`record(size)` gives the step for a batch of that size.

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
