"""Full blocks that can be used again: found by a hash of their tokens and all before them, in order of last use."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

import numpy as np


def block_digest(parent: bytes, tokens: list[int]) -> bytes:
    return blake2b(parent + np.array(tokens, dtype=np.int64).tobytes(), digest_size=16).digest()


def root_digest(salt: str | None) -> bytes:
    """The parent of first blocks. Requests of different salts share nothing."""
    return b"" if salt is None else blake2b(salt.encode(), digest_size=16).digest()


class Entry(NamedTuple):
    block: int
    tokens: tuple[int, ...]
    parent: int | str | None  # serial of the entry before it, or the salt where there is none
    serial: int  # never given twice


class PrefixCache:
    """A hash alone never decides: tokens are compared, and parents by their serial numbers, so that a block is only
    taken for what it holds, whatever the hash function does."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.entries: dict[bytes, Entry] = {}
        self.digest_of: dict[int, bytes] = {}  # by block
        self.idle: OrderedDict[int, None] = OrderedDict()  # unreferenced blocks, least recently used first
        self._next_serial = 0

    def extend(self, digests: list[bytes], tokens: list[int], count: int, salt: str | None) -> None:
        """Completes the digests of the first `count` blocks."""
        size = self.block_size
        parent = digests[-1] if digests else root_digest(salt)
        for start in range(len(digests) * size, count * size, size):
            parent = block_digest(parent, tokens[start : start + size])
            digests.append(parent)

    def find(self, digests: list[bytes], tokens: list[int], salt: str | None) -> list[Entry]:
        """The entries of the longest run of known blocks from the first on."""
        found: list[Entry] = []
        parent: int | str | None = salt
        for i, digest in enumerate(digests):
            entry = self.entries.get(digest)
            content = tuple(tokens[i * self.block_size : (i + 1) * self.block_size])
            if entry is None or entry.parent != parent or entry.tokens != content:
                break
            found.append(entry)
            parent = entry.serial
        return found

    def insert(self, digest: bytes, block: int, tokens: tuple[int, ...], parent: int | str | None) -> tuple[int, int]:
        """Enters a block; its serial, and the block that lost its entry to it (-1: none).

        Where the same content is known already, in another block, that one stays and its serial is returned.
        """
        old = self.entries.get(digest)
        if old is not None and (old.tokens, old.parent) == (tokens, parent):
            return old.serial, -1
        entry = Entry(block, tokens, parent, self._next_serial)
        self._next_serial += 1
        self.entries[digest] = entry
        self.digest_of[block] = digest
        if old is None:
            return entry.serial, -1
        del self.digest_of[old.block]
        return entry.serial, old.block

    def evict(self) -> int:
        """Forgets the unreferenced block whose last use is the longest ago."""
        block, _ = self.idle.popitem(last=False)
        del self.entries[self.digest_of.pop(block)]
        return block

    def clear(self) -> list[int]:
        """Forgets everything; the blocks that were idle."""
        idle = list(self.idle)
        for part in (self.entries, self.digest_of, self.idle):
            part.clear()
        return idle
