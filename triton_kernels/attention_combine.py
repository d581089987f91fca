"""The second launch of paged_attention: partial results of split keys to out and lse."""

import triton
import triton.language as tl

from .attention_schedule import chunk_of_batch, lengths, partials_before, splits_of, work_of
from .common import float32_at, kernel, narrow, row_pointers

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HEADS = tl.constexpr(8)  # query heads of a KV head done together


@triton.jit
def add_sink(b_max, b_sum, p_sink, m_sink):
    """(what old sums are multiplied by, sum, maximum) with a sink, one more logit without a value. It is compared
    before the maximum is taken from it: the compiler may fuse its product with the subtraction, which for a large sink
    leaves more than an exponent can hold."""
    b_sink = tl.load(p_sink, mask=m_sink, other=float("-inf")) * LOG2E
    b_top = tl.maximum(b_max, b_sink)
    guard = tl.where(b_top == float("-inf"), 0.0, b_top)
    shrink = tl.exp2(b_max - guard)
    weight = tl.where(b_sink >= guard, 1.0, tl.exp2(b_sink - guard))
    return shrink, b_sum * shrink + weight, b_top


@kernel
def paged_attention_combine_kernel(
    out, seq_lens, cu_seqlens_q: tl.int64, sinks: tl.int64, lse: tl.int64, partials: tl.int64,
    out_stride_token: tl.int64, out_stride_head: tl.int64, lse_stride_token: tl.int64, lse_stride_head: tl.int64,
    num_seqs: tl.int32, split_tokens: tl.int32, group: tl.int32, num_kv_heads: tl.int32, head_dim_by_8: tl.int32,
    window_left: tl.int32, num_splits: tl.int32, target: tl.int32, num_partial_rows: tl.int64,
    BLOCK_N: tl.constexpr, VECTOR: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """grid [num_seqs * split_tokens * num_kv_heads]: one query token of a sequence, the heads of one KV head."""
    work = tl.program_id(0) // num_kv_heads
    kv_head = tl.program_id(0) - work * num_kv_heads
    seq = work // split_tokens
    token = work - seq * split_tokens
    first_token, q_len, seq_len = lengths(seq, seq < num_seqs, seq_lens, cu_seqlens_q)
    _, _, blocks = work_of(q_len, seq_len, group, window_left, BLOCK_N)
    chunk = chunk_of_batch(seq_lens, cu_seqlens_q, num_seqs, group, window_left, num_splits, target, BLOCK_N)
    splits, _ = splits_of(q_len, blocks, num_splits, chunk)
    if (token < q_len) & (splits > 1):
        base = partials_before(seq, seq_lens, cu_seqlens_q, group, window_left, num_splits, chunk, BLOCK_N)
        p_partial = float32_at(partials)
        head_dim = head_dim_by_8 * 8
        num_rows = num_partial_rows * num_kv_heads
        p_partial_max = p_partial + num_rows * head_dim
        i_d = tl.arange(0, BLOCK_D)
        for first in range(0, group, HEADS):
            i_head = first + tl.arange(0, HEADS)
            m_head = i_head < group
            mask = m_head[:, None] & (i_d < head_dim)[None, :]
            head = (kv_head * group + i_head).to(tl.int64)
            b_max = tl.full((HEADS,), float("-inf"), tl.float32)
            b_sum = tl.zeros((HEADS,), tl.float32)
            b_out = tl.zeros((HEADS, BLOCK_D), tl.float32)
            for split in range(0, splits):
                row = (base + (split * q_len + token) * group + i_head).to(tl.int64) * num_kv_heads + kv_head
                b_top = tl.load(p_partial_max + row, mask=m_head, other=float("-inf"))
                b_part_sum = tl.load(p_partial_max + num_rows + row, mask=m_head, other=0.0)
                b_part = tl.load(row_pointers(p_partial, row * head_dim, i_d, 16), mask=mask, other=0.0)
                b_new = tl.maximum(b_max, b_top)
                guard = tl.where(b_new == float("-inf"), 0.0, b_new)
                shrink, weight = tl.exp2(b_max - guard), tl.exp2(b_top - guard)
                b_sum = b_sum * shrink + b_part_sum * weight
                b_out = b_out * shrink[:, None] + b_part * weight[:, None]
                b_max = b_new
            shrink, b_sum, b_max = add_sink(b_max, b_sum, float32_at(sinks) + head, m_head & (sinks != 0))
            b_out = b_out * (shrink / tl.where(b_sum > 0, b_sum, 1.0))[:, None]
            o_token = (first_token + token).to(tl.int64)
            o_out = o_token * out_stride_token + head * out_stride_head
            tl.store(row_pointers(out, o_out, i_d, VECTOR), narrow(b_out, out.dtype.element_ty), mask=mask)
            b_lse = tl.where(b_sum > 0, (b_max + tl.log2(b_sum)) * LN2, float("-inf"))
            p_lse = float32_at(lse) + o_token * lse_stride_token + head * lse_stride_head
            tl.store(p_lse, b_lse, mask=m_head & (lse != 0))
