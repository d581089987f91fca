"""The three writers' common part: which tokens a program writes, and how a row gets into the cache.

Tokens with one slot must be written by one program, in order, so that the later overwrites the earlier whole: a program
owns the slots whose low bits are its index, reads the whole mapping and takes its own tokens one after the other.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .common import float32_at, next_power_of_2, padded_head_dim, row_pointers, wide
from .fp8 import IS_PLAIN, encode

MIN_PROGRAMS, MAX_PROGRAMS = 256, 1024  # between them one for two tokens: each reads the whole mapping, from the L2
SMALL_CHUNK, MAX_CHUNK = 128, 1024  # entries of the mapping read at once
TILE_ELEMENTS = 1024  # of each of key and value, per step


class Sizes(NamedTuple):
    programs: int
    chunk: int
    rows: int  # heads of a tile
    block_d: int


def plan(num_slots: int, num_heads: int, head_dim: int) -> Sizes:
    """The constexprs of a writer and the programs to launch, by the shape alone."""
    block_d = padded_head_dim(head_dim)
    return Sizes(
        programs=min(next_power_of_2(num_slots), max(MIN_PROGRAMS, min(MAX_PROGRAMS, next_power_of_2(num_slots) // 2))),
        chunk=MAX_CHUNK if num_slots > SMALL_CHUNK else SMALL_CHUNK,
        rows=min(next_power_of_2(num_heads), max(1, TILE_ELEMENTS // block_d)),
        block_d=block_d,
    )


@triton.jit
def owned_tokens(slots, slot_stride, num_slots, num_cache_slots, chunk, i_entry, ALL: tl.constexpr):
    """bool [CHUNK]: the tokens of this chunk that this program takes. ALL: also those that have no slot."""
    token = chunk + i_entry
    slot = tl.load(slots + token * slot_stride, mask=token < num_slots, other=-1).to(tl.int64)
    in_cache = (slot >= 0) & (slot < num_cache_slots)
    home = tl.where(in_cache, slot, token)
    mine = ((home & (tl.num_programs(0) - 1)) == tl.program_id(0)) & (token < num_slots)
    return mine if ALL else mine & in_cache


@triton.jit
def next_owned(mine, i_entry, after, CHUNK: tl.constexpr):
    """The first entry behind `after` that is mine, CHUNK where there is none."""
    return tl.min(tl.where(mine & (i_entry > after), i_entry, CHUNK), 0)


@triton.jit
def load_scale(scale, o_scale, mask):
    """float32 at the element offsets, 1 where there is no scale (address 0)."""
    return tl.load(float32_at(scale) + o_scale, mask=mask & (scale != 0), other=1.0)


@triton.jit
def store_rows(tile, cache, o_cache, i_column, mask, scale, FORMAT: tl.constexpr, VECTOR: tl.constexpr):
    """Stores tile [ROWS, columns] at the element offsets o_cache [ROWS]; scale [ROWS] divides first if FP8."""
    if FORMAT == IS_PLAIN:
        stored = tile
    else:
        stored = encode(tl.div_rn(wide(tile), scale[:, None]), FORMAT)
    tl.store(row_pointers(cache, o_cache, i_column, VECTOR), stored, mask=mask)
