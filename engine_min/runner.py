"""Turns a list of scheduled chunks into one forward pass on fixed metadata buffers."""

from __future__ import annotations

import numpy as np
import torch

from engine_min.attention import Attention, BatchMetadata
from engine_min.block_manager import BlockManager
from engine_min.sampler import sample
from engine_min.scheduler import ScheduledChunk


class Runner:
    """The buffers are allocated once and filled in place, so that a recorded step would see the new values."""

    def __init__(self, model, attention: Attention, blocks: BlockManager, max_num_tokens: int):
        self.model = model
        self.attention = attention
        self.blocks = blocks
        max_num_seqs, max_blocks = blocks.tables.shape
        self._token_ids, self._token_ids_np = _buffer(max_num_tokens, torch.int64)
        self._positions, self._positions_np = _buffer(max_num_tokens, torch.int64)
        self._slots, self._slots_np = _buffer(max_num_tokens, torch.int64)
        self._seq_lens, self._seq_lens_np = _buffer(max_num_seqs, torch.int32)
        self._cu_seqlens, self._cu_seqlens_np = _buffer(max_num_seqs + 1, torch.int32)
        self._block_table, self._block_table_np = _buffer((max_num_seqs, max_blocks), torch.int32)

    @torch.inference_mode()
    def step(self, chunks: list[ScheduledChunk]) -> list[int | None]:
        """Runs the chunks; a token (None: the logits were unusable) for each chunk that samples, in order."""
        batch, num_tokens = self._prepare(chunks)
        self.attention.begin(batch)
        hidden = self.model(self._token_ids[:num_tokens], self.attention)
        sampling = [i for i, chunk in enumerate(chunks) if chunk.samples]
        if not sampling:
            return []
        if len(sampling) < num_tokens:
            hidden = hidden[self._cu_seqlens[1:].index_select(0, torch.tensor(sampling)).long() - 1]
        return sample(self.model.logits(hidden), [chunks[i].request for i in sampling])

    def _prepare(self, chunks: list[ScheduledChunk]) -> tuple[BatchMetadata, int]:
        num_seqs = len(chunks)
        counts = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)
        starts = np.array([chunk.request.num_computed for chunk in chunks], dtype=np.int32)
        rows = np.array([chunk.request.row for chunk in chunks])
        ends = self._cu_seqlens_np[1 : num_seqs + 1]
        np.cumsum(counts, out=ends)
        num_tokens = int(ends[-1])

        ids: list[int] = []
        for chunk in chunks:
            start = chunk.request.num_computed
            ids += chunk.request.tokens[start : start + chunk.num_tokens]
        self._token_ids_np[:num_tokens] = ids

        seq_lens = self._seq_lens_np[:num_seqs]
        np.add(starts, counts, out=seq_lens)
        positions = self._positions_np[:num_tokens]
        positions[:] = np.arange(num_tokens) + np.repeat(seq_lens - ends, counts)

        block_size = self.blocks.block_size
        max_seq_len = int(seq_lens.max())
        width = self.blocks.blocks_for(max_seq_len)
        np.take(self.blocks.tables[:, :width], rows, axis=0, out=self._block_table_np[:num_seqs, :width])
        pages = self.blocks.tables[np.repeat(rows, counts), positions // block_size]
        self._slots_np[:num_tokens] = pages.astype(np.int64) * block_size + positions % block_size

        batch = BatchMetadata(
            positions=self._positions[:num_tokens],
            slot_mapping=self._slots[:num_tokens],
            block_table=self._block_table[:num_seqs, :width],
            seq_lens=self._seq_lens[:num_seqs],
            cu_seqlens_q=self._cu_seqlens[: num_seqs + 1],
            max_seqlen_q=int(counts.max()),
            max_seqlen_k=max_seq_len,
        )
        return batch, num_tokens


def _buffer(shape: int | tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray]:
    """A tensor and a numpy view of the same memory: filling the view costs a tenth of filling the tensor."""
    tensor = torch.zeros(shape, dtype=dtype)
    return tensor, tensor.numpy()
