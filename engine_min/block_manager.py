"""Which block of the pool belongs to whom. Blocks are taken as tokens arrive and go back the step a sequence ends."""

from __future__ import annotations

import numpy as np


class BlockManager:
    """Each running sequence has a row of `tables`; the row is what the runner gathers into the op's block table.

    Blocks carry reference counts, so that several sequences may come to share one; here every count is 0 or 1.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks
        self.tables = np.zeros((max_num_seqs, self.blocks_for(max_model_len)), dtype=np.int32)
        self.num_held = [0] * max_num_seqs  # entries of the row that are in use
        self.peak_used = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block last returned is warm, and goes out first
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def open_row(self) -> int:
        return self._free_rows.pop()

    def can_grow(self, row: int | None, num_tokens: int) -> bool:
        """Whether the row (None: a new one) can come to hold num_tokens."""
        held = 0 if row is None else self.num_held[row]
        return self.blocks_for(num_tokens) - held <= len(self._free)

    def grow(self, row: int, num_tokens: int) -> None:
        """Takes the blocks that the row lacks for its first num_tokens tokens; the caller has asked `can_grow`."""
        for i in range(self.num_held[row], self.blocks_for(num_tokens)):
            block = self._free.pop()
            self.ref_counts[block] = 1
            self.tables[row, i] = block
            self.num_held[row] = i + 1
        self.peak_used = max(self.peak_used, self.num_used)

    def close_row(self, row: int) -> None:
        for block in self.tables[row, : self.num_held[row]].tolist():
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free.append(block)
        self.num_held[row] = 0
        self._free_rows.append(row)

    def check_integrity(self) -> None:
        """Every block is either free or referenced as often as its count says; used by tests after each step."""
        references = [0] * self.num_blocks
        for row, held in enumerate(self.num_held):
            if row in self._free_rows and held:
                raise AssertionError(f"closed row {row} holds {held} blocks")
            for block in self.tables[row, :held].tolist():
                references[block] += 1
        if references != self.ref_counts:
            raise AssertionError("reference counts do not match the tables")
        free = set(self._free)
        if len(free) != len(self._free) or len(set(self._free_rows)) != len(self._free_rows):
            raise AssertionError("a block or a row is twice in its free list")
        if free != {block for block, count in enumerate(self.ref_counts) if count == 0}:
            raise AssertionError("the free list is not the set of unreferenced blocks")
