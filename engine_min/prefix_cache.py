"""Full blocks that can be used again: found by their tokens and all before them, in order of last use."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import NamedTuple


class Key(NamedTuple):
    parent: int | str | None  # serial of the block before it, or the salt where there is none
    tokens: tuple[int, ...]


class Entry(NamedTuple):
    block: int
    serial: int  # never given twice


class PrefixCache:
    """A dictionary of whole keys: a block is only taken for what it holds, whatever their hashes are."""

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

    def clear(self) -> list[int]:
        """Forgets everything; the blocks that were idle."""
        idle = list(self.idle)
        for part in (self.entries, self.key_of, self.idle):
            part.clear()
        return idle
