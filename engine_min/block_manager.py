"""Which block of the pool belongs to whom. Blocks are taken as tokens arrive and go back the step a sequence ends."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from engine_min.prefix_cache import Entry, PrefixCache

Pairs = list[tuple[int, int]]  # (source block, destination block)


class Mover(Protocol):
    """Moves the contents of blocks, in the order of the calls."""

    def copy(self, pairs: Pairs) -> None: ...
    def swap_out(self, pairs: Pairs) -> None: ...
    def swap_in(self, pairs: Pairs) -> None: ...


class BlockManager:
    """Each running sequence has a row of `tables`; the row is what the runner gathers into the op's block table.

    Blocks carry reference counts. Several rows share a block after a fork or a hit in the prefix cache; who writes to a
    partly filled one that others hold too gets a copy first. An unreferenced block is free, or idle if the prefix cache
    knows its contents: then it can be found again until it is needed for something else.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int,
                 mover: Mover | None = None, num_host_blocks: int = 0, prefix_caching: bool = True):  # fmt: skip
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks
        self.tables = np.zeros((max_num_seqs, self.blocks_for(max_model_len)), dtype=np.int32)
        self.num_held = [0] * max_num_seqs  # entries of the row that are in use
        self.peak_used = 0
        self.prefix = PrefixCache(block_size)
        self.prefix_caching = prefix_caching
        self._mover = mover
        self._serials: list[list[int]] = [[] for _ in range(max_num_seqs)]  # prefix entries of the row's full blocks
        self._forked: set[int] = set()  # rows that may share the block they write to next
        self._copies: Pairs = []  # not done yet
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block last returned is warm, and goes out first
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.num_host_blocks = num_host_blocks
        self._free_host = list(range(num_host_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, the idle ones included."""
        return len(self._free) + len(self.prefix.idle)

    @property
    def num_idle(self) -> int:
        return len(self.prefix.idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- Rows.

    def open_row(self, pinned: list[Entry] = ()) -> int:
        """A row that starts with blocks found by `pin`."""
        row = self._free_rows.pop()
        self.tables[row, : len(pinned)] = [entry.block for entry in pinned]
        self.num_held[row] = len(pinned)
        self._serials[row] = [entry.serial for entry in pinned]
        return row

    def fork_row(self, row: int, num_tokens: int) -> int:
        """A second row that shares all blocks of one which holds num_tokens."""
        other = self._free_rows.pop()
        held = self.num_held[row]
        self.tables[other, :held] = self.tables[row, :held]
        self.num_held[other] = held
        self._serials[other] = list(self._serials[row])
        for block in self.tables[row, :held].tolist():
            self.ref_counts[block] += 1
        if num_tokens % self.block_size:
            self._forked.update((row, other))
        return other

    def has_room(self, row: int, end: int) -> bool:
        """Whether the row's own blocks hold the tokens before `end`: then it neither grows nor copies."""
        return end <= self.num_held[row] * self.block_size and row not in self._forked

    def _missing(self, row: int, start: int, end: int) -> int:
        return self.blocks_for(end) - self.num_held[row] + self._writes_to_shared(row, start)

    def _writes_to_shared(self, row: int, start: int) -> bool:
        return row in self._forked and self.ref_counts[self.tables[row, start // self.block_size]] > 1

    def can_grow(self, row: int, start: int, end: int) -> bool:
        """Whether the row can take tokens start..end-1."""
        return self._missing(row, start, end) <= self.num_free

    def grow(self, row: int, start: int, end: int) -> None:
        """Takes the blocks that the row lacks for tokens start..end-1; the caller has asked `can_grow`."""
        if row in self._forked:
            if self._writes_to_shared(row, start):
                shared, own = int(self.tables[row, start // self.block_size]), self._take()
                self.ref_counts[shared] -= 1
                self.tables[row, start // self.block_size] = own
                self._copies.append((shared, own))
            self._forked.discard(row)  # alone with the block from here on
        for i in range(self.num_held[row], self.blocks_for(end)):
            self.tables[row, i] = self._take()
            self.num_held[row] = i + 1
        self.peak_used = max(self.peak_used, self.num_used)

    def flush_copies(self) -> None:
        """Before a step writes, and before any block is returned: so no block is part of two copies at once."""
        copies, self._copies = self._copies, []
        if copies:
            self._mover.copy(copies)

    def close_row(self, row: int) -> None:
        self.flush_copies()
        for block in reversed(self.tables[row, : self.num_held[row]].tolist()):  # a prefix outlives what follows it
            self._release(block)
        self.num_held[row] = 0
        self._serials[row] = []
        self._forked.discard(row)
        self._free_rows.append(row)

    def _take(self) -> int:
        block = self._free.pop() if self._free else self.prefix.evict()
        self.ref_counts[block] = 1
        return block

    def _release(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            if block in self.prefix.digest_of:
                self.prefix.idle[block] = None
            else:
                self._free.append(block)

    # ---- The prefix cache.

    def pin(self, digests: list[bytes], tokens: list[int], salt: str | None) -> list[Entry]:
        """Finds the longest known prefix (of the digests given) and holds its blocks, lest they be evicted."""
        found = self.prefix.find(digests, tokens, salt)
        for entry in found:
            self.prefix.idle.pop(entry.block, None)
            self.ref_counts[entry.block] += 1
        return found

    def unpin(self, found: list[Entry]) -> None:
        for entry in reversed(found):
            self._release(entry.block)

    def commit(self, row: int, digests: list[bytes], tokens: list[int], num_computed: int, salt: str | None) -> None:
        """Makes the row's blocks that are full and computed known, so that others can find them."""
        size, serials = self.block_size, self._serials[row]
        count = num_computed // size
        self.prefix.extend(digests, tokens, count, salt)
        for i in range(len(serials), count):
            content = tuple(tokens[i * size : (i + 1) * size])
            parent = serials[-1] if serials else salt
            serial, forgotten = self.prefix.insert(digests[i], int(self.tables[row, i]), content, parent)
            serials.append(serial)
            if forgotten in self.prefix.idle:
                del self.prefix.idle[forgotten]
                self._free.append(forgotten)

    def reset_prefix_cache(self) -> None:
        """Forgets all contents, for example because the weights have changed. Needs every row closed."""
        if len(self._free_rows) != len(self.num_held):
            raise RuntimeError("the prefix cache can only be reset while no sequence runs")
        self._free += self.prefix.clear()

    # ---- Host memory.

    def swap_out(self, row: int) -> list[int] | None:
        """Moves the row's contents to host blocks, which are returned; None, and nothing done, if too few are free."""
        held = self.num_held[row]
        if not 0 < held <= len(self._free_host):
            return None
        self.flush_copies()
        host = self._free_host[-held:]
        self._mover.swap_out(list(zip(self.tables[row, :held].tolist(), host, strict=True)))
        del self._free_host[-held:]
        return host

    def swap_in(self, row: int, host: list[int]) -> None:
        """Brings contents back; what the row already holds, found in the prefix cache, is left as it is."""
        start = self.num_held[row]
        self.grow(row, start * self.block_size, len(host) * self.block_size)
        pairs = list(zip(host[start:], self.tables[row, start : len(host)].tolist(), strict=True))
        if pairs:
            self._mover.swap_in(pairs)
        self.drop_host(host)

    def drop_host(self, host: list[int]) -> None:
        self._free_host += host

    def check_integrity(self, host_in_use: list[int] = ()) -> None:
        """Every block is either free, idle or referenced as often as its count says; used by tests after each step."""
        references = [0] * self.num_blocks
        for row, held in enumerate(self.num_held):
            if row in self._free_rows and held:
                raise AssertionError(f"closed row {row} holds {held} blocks")
            for block in self.tables[row, :held].tolist():
                references[block] += 1
        if references != self.ref_counts:
            raise AssertionError("reference counts do not match the tables")
        free, idle = set(self._free), set(self.prefix.idle)
        if len(free) != len(self._free) or len(set(self._free_rows)) != len(self._free_rows):
            raise AssertionError("a block or a row is twice in its free list")
        if free & idle or free | idle != {block for block, count in enumerate(self.ref_counts) if count == 0}:
            raise AssertionError("free and idle blocks are not the set of unreferenced blocks")
        known = {entry.block: digest for digest, entry in self.prefix.entries.items()}
        if known != self.prefix.digest_of or len(known) != len(self.prefix.entries):
            raise AssertionError("a block is known under two hashes, or under none")
        if idle - set(known) or free & set(known):
            raise AssertionError("the idle blocks are not the unreferenced ones that are known")
        if sorted([*self._free_host, *host_in_use]) != list(range(self.num_host_blocks)):
            raise AssertionError("host blocks are lost or have two owners")
