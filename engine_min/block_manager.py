"""Which block of the pool belongs to whom. Blocks are taken as tokens arrive and go back the step a sequence ends."""

from collections import Counter, OrderedDict
from itertools import count
from typing import NamedTuple

import numpy as np

Pairs = list[tuple[int, int]]  # (source block, destination block)


class Key(NamedTuple):
    parent: int | str | None  # serial of the block before it, or the salt where there is none
    tokens: tuple[int, ...]


class Entry(NamedTuple):
    block: int
    serial: int  # never given twice


class PrefixCache:
    """Full blocks that can be used again: found by their tokens and all before them, in order of last use. A dictionary
    of whole keys: a block is only taken for what it holds, whatever their hashes are."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.entries: dict[Key, Entry] = {}
        self.key_of: dict[int, Key] = {}  # by block
        self.idle: OrderedDict[int, None] = OrderedDict()  # unreferenced blocks, least recently used first
        self._serials = count()

    def find(self, tokens: list[int], salt: str | None) -> list[Entry]:
        """The entries of the longest run of known blocks from the first on."""
        size, found, parent = self.block_size, [], salt
        for end in range(size, len(tokens) + 1, size):
            entry = self.entries.get(Key(parent, tuple(tokens[end - size : end])))
            if entry is None:
                break
            found.append(entry)
            parent = entry.serial
        return found

    def insert(self, block: int, parent: int | str | None, tokens: list[int]) -> int:
        """Enters a block; its serial. Where another block holds the same, that one stays and gives its own."""
        key = Key(parent, tuple(tokens))
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(block, next(self._serials))
            self.key_of[block] = key
        return entry.serial

    def evict(self) -> int:
        """Forgets the unreferenced block whose last use is the longest ago."""
        block, _ = self.idle.popitem(last=False)
        del self.entries[self.key_of.pop(block)]
        return block


class BlockManager:
    """Each running sequence has a row of `tables`; the row is what the runner gathers into the op's block table.

    Blocks carry reference counts. Several rows share a block after a fork or a hit in the prefix cache; who writes to a
    partly filled one that others hold too gets a copy first. An unreferenced block is free, or idle if the prefix cache
    knows its contents: then it can be found again until it is needed for something else.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int, mover=None,
                 num_host_blocks: int = 0, prefix_caching: bool = True):  # fmt: skip
        """`mover` has copy, swap_out and swap_in, which move the contents of blocks (KVCache)."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks
        self.tables = np.zeros((max_num_seqs, self.blocks_for(max_model_len)), dtype=np.int32)
        self.num_held = [0] * max_num_seqs  # entries of the row that are in use
        self.room = [0] * max_num_seqs  # tokens before this position need no `grow`
        self.peak_used = 0
        self.prefix = PrefixCache(block_size)
        self.prefix_caching = prefix_caching
        self._mover = mover
        self._serials: list[list[int]] = [[] for _ in range(max_num_seqs)]  # prefix entries of the row's full blocks
        self._copies: Pairs = []  # not done yet
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block last returned is warm, and goes out first
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.num_host_blocks = num_host_blocks
        self._free_host = list(range(num_host_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, the idle ones included."""
        return len(self._free) + len(self.prefix.idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def blocks_of(self, row: int) -> list[int]:
        return self.tables[row, : self.num_held[row]].tolist()

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
        self.tables[other] = self.tables[row]
        self.num_held[other], self.room[other] = self.num_held[row], self.room[row]
        self._serials[other] = list(self._serials[row])
        for block in self.blocks_of(row):
            self.ref_counts[block] += 1
        if num_tokens % self.block_size:  # whoever writes first to the last block must copy it
            self.room[row] = self.room[other] = 0
        return other

    def grow(self, row: int, start: int, end: int) -> bool:
        """Takes the blocks that the row lacks for tokens start..end-1; False, and nothing taken, if too few are free.

        A block that others hold too is copied before it is written to.
        """
        first, held = start // self.block_size, self.num_held[row]
        needed = max(held, self.blocks_for(end))
        is_shared = first < held and self.ref_counts[self.tables[row, first]] > 1
        if needed - held + is_shared > self.num_free:
            return False
        if is_shared:
            shared, own = int(self.tables[row, first]), self._take()
            self.ref_counts[shared] -= 1
            self.tables[row, first] = own
            self._copies.append((shared, own))
        for i in range(held, needed):
            self.tables[row, i] = self._take()
        self.num_held[row], self.room[row] = needed, needed * self.block_size
        self.peak_used = max(self.peak_used, self.num_used)
        return True

    def flush_copies(self) -> None:
        """Before a step writes, and before any block is returned: so no block is part of two copies at once."""
        copies, self._copies = self._copies, []
        if copies:
            self._mover.copy(copies)

    def close_row(self, row: int) -> None:
        self.flush_copies()
        self._release(self.blocks_of(row))
        self.num_held[row] = self.room[row] = 0
        self._serials[row] = []
        self._free_rows.append(row)

    def _take(self) -> int:
        block = self._free.pop() if self._free else self.prefix.evict()
        self.ref_counts[block] = 1
        return block

    def _release(self, blocks: list[int]) -> None:
        """The last first: a prefix outlives what follows it."""
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if block in self.prefix.key_of:
                    self.prefix.idle[block] = None
                else:
                    self._free.append(block)

    # ---- The prefix cache.

    def pin(self, tokens: list[int], salt: str | None) -> list[Entry]:
        """Finds the longest known prefix and holds its blocks, lest they be evicted."""
        found = self.prefix.find(tokens, salt)
        for entry in found:
            self.prefix.idle.pop(entry.block, None)
            self.ref_counts[entry.block] += 1
        return found

    def unpin(self, found: list[Entry]) -> None:
        self._release([entry.block for entry in found])

    def commit(self, row: int, tokens: list[int], num_computed: int, salt: str | None) -> None:
        """Makes the row's blocks that are full and computed known, so that others can find them."""
        size, serials = self.block_size, self._serials[row]
        for i in range(len(serials), num_computed // size):
            parent = serials[-1] if serials else salt
            serials.append(self.prefix.insert(int(self.tables[row, i]), parent, tokens[i * size : (i + 1) * size]))

    def reset_prefix_cache(self) -> None:
        """Forgets all contents, for example because the weights have changed. Needs every row closed."""
        if len(self._free_rows) != len(self.num_held):
            raise RuntimeError("the prefix cache can only be reset while no sequence runs")
        self._free += self.prefix.idle
        self.prefix = PrefixCache(self.block_size)

    # ---- Host memory.

    def swap_out(self, row: int) -> list[int] | None:
        """Moves the row's contents to host blocks, which are returned; None, and nothing done, if too few are free."""
        held = self.num_held[row]
        if not 0 < held <= len(self._free_host):
            return None
        self.flush_copies()
        host = self._free_host[-held:]
        self._mover.swap_out(list(zip(self.blocks_of(row), host, strict=True)))
        del self._free_host[-held:]
        return host

    def swap_in(self, row: int, host: list[int]) -> None:
        """Brings contents back; what the row already holds, found in the prefix cache, is left as it is."""
        start = self.num_held[row]
        self.grow(row, start * self.block_size, len(host) * self.block_size)
        pairs = list(zip(host, self.blocks_of(row), strict=False))[start:]
        if pairs:
            self._mover.swap_in(pairs)
        self.drop_host(host)

    def drop_host(self, host: list[int]) -> None:
        self._free_host += host

    def check_integrity(self, host_in_use: list[int] = ()) -> None:
        """Every block is either free, idle or referenced as often as its count says; used by tests after each step."""
        held = Counter(block for row in range(len(self.num_held)) for block in self.blocks_of(row))
        known, idle, entries = self.prefix.key_of, self.prefix.idle.keys(), self.prefix.entries
        assert self.ref_counts == [held[i] for i in range(self.num_blocks)], "reference counts do not match the tables"
        assert not any(self.num_held[row] for row in self._free_rows), "a closed row holds blocks"
        assert len(set(self._free_rows)) == len(self._free_rows), "a row is free twice"
        assert sorted([*self._free, *idle, *held]) == list(range(self.num_blocks)), "a block has no place, or two"
        keys = {entry.block: key for key, entry in entries.items()}
        assert known == keys and len(keys) == len(entries), "a block is known under two keys, or under none"
        assert idle <= known.keys() and not known.keys() & set(self._free), "idle is not what is free and known"
        host = sorted([*self._free_host, *host_in_use])
        assert host == list(range(self.num_host_blocks)), "host blocks are lost or have two owners"
