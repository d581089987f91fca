"""Turns a list of scheduled chunks into one forward pass on fixed metadata buffers."""

from __future__ import annotations

import numpy as np
import torch

from engine_min.attention import Attention, BatchMetadata
from engine_min.block_manager import BlockManager
from engine_min.graphs import StepGraphs, buckets_for
from engine_min.request import Request
from engine_min.sampler import sample
from engine_min.scheduler import ScheduledChunk

NO_SLOT = -1
LOGPROB_ROWS = 64  # of a prompt at a time: logits of a whole prompt would take more memory than its cache


class Runner:
    """The buffers are allocated once and filled in place, so that a recorded step sees the new values.

    A batch in which every sequence has one token is padded to a recorded size: padding rows have no keys (seq_len 0)
    and no slot (-1). Any other batch runs as it is.
    """

    def __init__(self, model, attention: Attention, blocks: BlockManager, max_num_tokens: int, max_model_len: int,
                 device: torch.device, eager: bool = False):  # fmt: skip
        self.model = model
        self.attention = attention
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.device = device
        max_num_seqs, max_blocks = blocks.tables.shape
        self._token_ids = _Buffer(max_num_tokens, torch.int64, device)
        self._positions = _Buffer(max_num_tokens, torch.int64, device)
        self._slots = _Buffer(max_num_tokens, torch.int64, device)
        self._seq_lens = _Buffer(max_num_seqs, torch.int32, device)
        self._cu_seqlens = _Buffer(max_num_seqs + 1, torch.int32, device)
        self._block_table = _Buffer((max_num_seqs, max_blocks), torch.int32, device)
        self._slots.host.fill(NO_SLOT)  # the first recording must write nowhere
        self._slots.upload(max_num_tokens)
        self.graphs: StepGraphs | None = None
        if not eager:
            self.record()

    @torch.inference_mode()
    def record(self) -> None:
        """Records the decode steps; again after the model has been replaced."""
        self.graphs = StepGraphs(self._recorded_step, buckets_for(self.blocks.tables.shape[0]), self.device)

    def _recorded_step(self, size: int):
        """Whatever changes from step to step is in the buffers; lengths and table widths are upper bounds."""
        batch = BatchMetadata(
            positions=self._positions.device[:size],
            slot_mapping=self._slots.device[:size],
            block_table=self._block_table.device[:size],
            seq_lens=self._seq_lens.device[:size],
            cu_seqlens_q=None,
            max_seqlen_q=1,
            max_seqlen_k=self.max_model_len,
        )
        token_ids = self._token_ids.device[:size]

        def step() -> torch.Tensor:
            self.attention.begin(batch)
            return self.model(token_ids, self.attention)

        return step

    @torch.inference_mode()
    def step(self, chunks: list[ScheduledChunk]) -> list[int | None]:
        """Runs the chunks. A token (None: the logits were unusable) for each that samples and each of its children, in
        order."""
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if self.graphs is not None and num_tokens == len(chunks):
            hidden = self._replay(chunks)
        else:
            hidden = self._run(chunks, num_tokens)
        rows: list[int] = []
        requests: list[Request] = []
        end, is_each_row_once = 0, True
        for chunk in chunks:
            end += chunk.num_tokens
            if chunk.request.params.prompt_logprobs is not None:
                self._report_prompt(chunk, hidden[end - chunk.num_tokens : end])
            if chunk.samples:
                rows.append(end - 1)
                requests.append(chunk.request)
                if chunk.children:
                    rows += [end - 1] * len(chunk.children)
                    requests += chunk.children
                    is_each_row_once = False
        if not requests:
            return []
        is_each_row_once &= len(rows) == num_tokens
        hidden = hidden[:num_tokens] if is_each_row_once else hidden[torch.tensor(rows, device=self.device)]
        return sample(self.model.logits(hidden), requests)

    def _replay(self, chunks: list[ScheduledChunk]) -> torch.Tensor:
        num_seqs, size = len(chunks), self.graphs.size_for(len(chunks))
        self._fill_decode(chunks)
        for buffer in (self._token_ids, self._positions, self._slots, self._seq_lens):
            buffer.host[num_seqs:size] = NO_SLOT if buffer is self._slots else 0
            buffer.upload(size)
        self._block_table.upload(num_seqs)
        return self.graphs.replay(size)

    def _fill_decode(self, chunks: list[ScheduledChunk]) -> None:
        """As `_fill`, in half the time, for chunks of one token."""
        num_seqs, block_size = len(chunks), self.blocks.block_size
        requests = [chunk.request for chunk in chunks]
        starts = [request.num_computed for request in requests]
        rows = np.array([request.row for request in requests])
        tokens = [request.tokens[start] for request, start in zip(requests, starts, strict=True)]
        self._token_ids.host[:num_seqs] = tokens
        positions = self._positions.host[:num_seqs]
        positions[:] = starts
        np.add(positions, 1, out=self._seq_lens.host[:num_seqs], casting="unsafe")
        width = max(starts) // block_size + 1
        np.take(self.blocks.tables[:, :width], rows, axis=0, out=self._block_table.host[:num_seqs, :width])
        columns, offsets = np.divmod(positions, block_size)
        slots = self._slots.host[:num_seqs]
        slots[:] = self.blocks.tables[rows, columns]
        slots *= block_size
        slots += offsets
        for i, chunk in enumerate(chunks):
            if chunk.num_stored > starts[i]:
                slots[i] = NO_SLOT

    def _run(self, chunks: list[ScheduledChunk], num_tokens: int) -> torch.Tensor:
        width = self._fill(chunks, num_tokens)
        num_seqs = len(chunks)
        for buffer in (self._token_ids, self._positions, self._slots):
            buffer.upload(num_tokens)
        for buffer, size in (
            (self._seq_lens, num_seqs),
            (self._cu_seqlens, num_seqs + 1),
            (self._block_table, num_seqs),
        ):
            buffer.upload(size)
        batch = BatchMetadata(
            positions=self._positions.device[:num_tokens],
            slot_mapping=self._slots.device[:num_tokens],
            block_table=self._block_table.device[:num_seqs, :width],
            seq_lens=self._seq_lens.device[:num_seqs],
            cu_seqlens_q=self._cu_seqlens.device[: num_seqs + 1],
            max_seqlen_q=max(chunk.num_tokens for chunk in chunks),
            max_seqlen_k=int(self._seq_lens.host[:num_seqs].max()),
        )
        self.attention.begin(batch)
        return self.model(self._token_ids.device[:num_tokens], self.attention)

    def _fill(self, chunks: list[ScheduledChunk], num_tokens: int) -> int:
        """Fills the host side of the buffers; the columns of the block table that are in use."""
        num_seqs, block_size = len(chunks), self.blocks.block_size
        counts = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)
        starts = np.array([chunk.request.num_computed for chunk in chunks], dtype=np.int32)
        rows = np.array([chunk.request.row for chunk in chunks])
        ends = self._cu_seqlens.host[1 : num_seqs + 1]
        np.cumsum(counts, out=ends)
        ids: list[int] = []
        for chunk in chunks:
            start = chunk.request.num_computed
            ids += chunk.request.tokens[start : start + chunk.num_tokens]
        self._token_ids.host[:num_tokens] = ids

        seq_lens = self._seq_lens.host[:num_seqs]
        np.add(starts, counts, out=seq_lens)
        positions = self._positions.host[:num_tokens]
        positions[:] = np.arange(num_tokens) + np.repeat(seq_lens - ends, counts)

        width = self.blocks.blocks_for(int(seq_lens.max()))
        np.take(self.blocks.tables[:, :width], rows, axis=0, out=self._block_table.host[:num_seqs, :width])
        pages = self.blocks.tables[np.repeat(rows, counts), positions // block_size]
        slots = self._slots.host[:num_tokens]
        slots[:] = pages.astype(np.int64) * block_size + positions % block_size
        for chunk, start, end in zip(chunks, starts.tolist(), ends.tolist(), strict=True):
            if chunk.num_stored > start:  # found in the prefix cache, shared with others: only its logits are wanted
                first = end - chunk.num_tokens
                slots[first : first + chunk.num_stored - start] = NO_SLOT
        return width

    def _report_prompt(self, chunk: ScheduledChunk, hidden: torch.Tensor) -> None:
        """Adds the log probabilities of the prompt's tokens that follow the chunk's."""
        request = chunk.request
        found, prompt, start = request.output.prompt_logprobs, request.prompt_token_ids, request.num_computed
        first = len(found) - 1 - start  # where an earlier run of a preempted request got to
        for begin in range(max(0, first), min(len(hidden), len(prompt) - 1 - start), LOGPROB_ROWS):
            rows = hidden[begin : begin + min(LOGPROB_ROWS, len(prompt) - 1 - start - begin)]
            logprobs = self.model.logits(rows).float().log_softmax(dim=-1)
            tokens = prompt[start + begin + 1 : start + begin + 1 + len(rows)]
            own = logprobs.gather(1, torch.tensor(tokens, device=self.device).unsqueeze(1)).squeeze(1).tolist()
            values, ids = (part.tolist() for part in logprobs.topk(request.params.prompt_logprobs, dim=-1))
            for token, logprob, top, top_values in zip(tokens, own, ids, values, strict=True):
                found.append({token: logprob} | dict(zip(top, top_values, strict=True)))


class _Buffer:
    """A fixed tensor on the device, and the memory on the host that fills it: on the CPU the same memory, seen through
    numpy, which fills it in a tenth of the time."""

    def __init__(self, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device):
        on_host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: np.ndarray = on_host.numpy()
        self.device = on_host.to(device)
        self._source = on_host if device.type != "cpu" else None

    def upload(self, count: int) -> None:
        """Brings the first `count` rows to the device. The host side may be filled again once the step's tokens are
        known: by then the copy has run."""
        if self._source is not None:
            self.device[:count].copy_(self._source[:count], non_blocking=True)
