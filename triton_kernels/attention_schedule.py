"""The schedule that every program of paged_attention makes for itself from the lengths: which sequence, tile and split
it is, and where partial results lie. Nothing is carried over from call to call, so that a captured graph stays valid.

Split edges come from the sequence's own length where num_splits is given. Where it is 0, the batch's key blocks are
cut into chunks of one size, so that a long sequence gets as many programs as it needs.
"""

import triton
import triton.language as tl

from .attention_plan import LARGE_ROWS, MIN_SPLIT_BLOCKS, SMALL_ROWS, SPLIT_TOKENS
from .common import int32_at

SMALL = tl.constexpr(SMALL_ROWS)
LARGE = tl.constexpr(LARGE_ROWS)
MAX_SPLIT_TOKENS = tl.constexpr(SPLIT_TOKENS)
LEAST_BLOCKS = tl.constexpr(MIN_SPLIT_BLOCKS)
SCAN = tl.constexpr(256)  # sequences looked at together


@triton.jit
def lengths(i_seq, m_seq, seq_lens, cu_seqlens_q):
    """(first row, query length, keys) of sequences, tensors or one; cu_seqlens_q is an address, 0 for None."""
    starts = int32_at(cu_seqlens_q)
    ragged = cu_seqlens_q != 0
    first = tl.load(starts + i_seq, mask=m_seq & ragged, other=0)
    last = tl.load(starts + i_seq + 1, mask=m_seq & ragged, other=0)
    first = tl.where(ragged, first, i_seq)
    q_len = tl.where(ragged, last - first, 1)
    q_len = tl.where(m_seq, q_len, 0)
    seq_len = tl.load(seq_lens + i_seq, mask=m_seq & (q_len > 0), other=0)
    return first, q_len, seq_len


@triton.jit
def work_of(q_len, seq_len, group, window_left, BLOCK_N: tl.constexpr):
    """(tiles, first key block, key blocks) of a sequence, from the first block that any of its rows sees."""
    rows = q_len * group
    tiles = tl.where(rows <= SMALL, tl.where(rows > 0, 1, 0), (rows + LARGE - 1) // LARGE)
    start = tl.maximum(seq_len - q_len, 0)
    first_block = tl.where(start > window_left, start - window_left, 0) // BLOCK_N
    blocks = (seq_len + BLOCK_N - 1) // BLOCK_N - first_block
    return tiles, first_block, tl.where(q_len > 0, tl.maximum(blocks, 0), 0)


@triton.jit
def splits_of(q_len, blocks, num_splits, chunk):
    """(splits, key blocks of each)."""
    each = tl.where(num_splits > 0, (blocks + num_splits - 1) // tl.maximum(num_splits, 1), chunk)
    each = tl.where(q_len <= MAX_SPLIT_TOKENS, tl.maximum(each, 1), tl.maximum(blocks, 1))
    return tl.maximum((blocks + each - 1) // each, 1), each


@triton.jit
def chunk_of_batch(
    seq_lens, cu_seqlens_q, num_seqs, group, window_left, num_splits, target, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Key blocks of a split where the device decides."""
    total = tl.zeros((), tl.int64)
    if num_splits == 0:
        for first in range(0, num_seqs, SCAN):
            i_seq = first + tl.arange(0, SCAN)
            _, q_len, seq_len = lengths(i_seq, i_seq < num_seqs, seq_lens, cu_seqlens_q)
            tiles, _, blocks = work_of(q_len, seq_len, group, window_left, BLOCK_N)
            total += tl.sum(tiles.to(tl.int64) * blocks, 0)
    return tl.maximum(((total + target - 1) // target).to(tl.int32), LEAST_BLOCKS)


@triton.jit
def find_item(
    item, direct, seq_lens, cu_seqlens_q, num_seqs, group, window_left, num_splits, chunk, BLOCK_N: tl.constexpr
):  # fmt: skip
    """(sequence, num_seqs if there are fewer items; the item's index in it; partial rows of the sequences before).
    direct: every sequence is one item."""
    seq = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    seen = tl.zeros((), tl.int32)
    partials = tl.zeros((), tl.int32)
    if direct != 0:
        seq += item
        before += item
    for first in range(0, tl.where(direct != 0, 0, num_seqs), SCAN):
        i_seq = first + tl.arange(0, SCAN)
        m_seq = i_seq < num_seqs
        _, q_len, seq_len = lengths(i_seq, m_seq, seq_lens, cu_seqlens_q)
        tiles, _, blocks = work_of(q_len, seq_len, group, window_left, BLOCK_N)
        splits, _ = splits_of(q_len, blocks, num_splits, chunk)
        items = seen + tl.cumsum(tiles * splits, 0)
        passed = m_seq & (items <= item)
        seq += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, items, 0), 0))
        partials += tl.sum(tl.where(passed & (splits > 1), q_len * group * splits, 0), 0)
        seen = tl.max(items, 0)
    return seq, item - before, partials


@triton.jit
def partials_before(
    seq, seq_lens, cu_seqlens_q, group, window_left, num_splits, chunk, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Partial rows of the sequences before this one."""
    partials = tl.zeros((), tl.int32)
    for first in range(0, seq, SCAN):
        i_seq = first + tl.arange(0, SCAN)
        _, q_len, seq_len = lengths(i_seq, i_seq < seq, seq_lens, cu_seqlens_q)
        _, _, blocks = work_of(q_len, seq_len, group, window_left, BLOCK_N)
        splits, _ = splits_of(q_len, blocks, num_splits, chunk)
        partials += tl.sum(tl.where(splits > 1, q_len * group * splits, 0), 0)
    return partials
