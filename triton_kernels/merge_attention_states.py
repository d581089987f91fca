"""merge_attention_states: two partial results of the same rows, weighed by their lse."""

import triton.language as tl

from .common import (
    address,
    cdiv,
    float32_at,
    kernel,
    launch,
    narrow,
    next_power_of_2,
    padded_head_dim,
    row_pointers,
    vector_bytes,
)

TILE_ELEMENTS = 4096


@kernel
def merge_attention_states_kernel(
    out, lse: tl.int64, out_a, lse_a, out_b, lse_b,
    out_stride_token: tl.int64, out_stride_head: tl.int64, lse_stride_token: tl.int64, lse_stride_head: tl.int64,
    a_stride_token: tl.int64, a_stride_head: tl.int64, lse_a_stride_token: tl.int64, lse_a_stride_head: tl.int64,
    b_stride_token: tl.int64, b_stride_head: tl.int64, lse_b_stride_token: tl.int64, lse_b_stride_head: tl.int64,
    num_rows: tl.int64, num_heads: tl.int64, head_dim_by_8: tl.int32,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = row < num_rows
    token = row // num_heads
    head = row - token * num_heads
    i_column = tl.arange(0, BLOCK_D)
    mask = m_row[:, None] & (i_column < head_dim_by_8 * 8)[None, :]
    b_lse_a = tl.load(lse_a + token * lse_a_stride_token + head * lse_a_stride_head, mask=m_row, other=0.0)
    b_lse_b = tl.load(lse_b + token * lse_b_stride_token + head * lse_b_stride_head, mask=m_row, other=0.0)
    b_a = tl.load(row_pointers(out_a, token * a_stride_token + head * a_stride_head, i_column, VECTOR), mask=mask)
    b_b = tl.load(row_pointers(out_b, token * b_stride_token + head * b_stride_head, i_column, VECTOR), mask=mask)
    empty_a, empty_b = tl.abs(b_lse_a) == float("inf"), tl.abs(b_lse_b) == float("inf")
    top = tl.maximum(tl.where(empty_a, b_lse_b, b_lse_a), tl.where(empty_b, b_lse_a, b_lse_b))
    top = tl.where(empty_a & empty_b, 0.0, top)
    exp_a = tl.where(empty_a, 0.0, tl.exp(b_lse_a - top))
    exp_b = tl.where(empty_b, 0.0, tl.exp(b_lse_b - top))
    total = exp_a + exp_b
    weight_a = tl.div_rn(exp_a, tl.where(total > 0, total, 1.0))
    weight_b = tl.div_rn(exp_b, tl.where(total > 0, total, 1.0))
    kind: tl.constexpr = out.dtype.element_ty
    merged = narrow(b_a.to(tl.float32) * weight_a[:, None] + b_b.to(tl.float32) * weight_b[:, None], kind)
    # What stands alone is taken as it is, and the values of an empty part, NaN perhaps, are dropped.
    merged = tl.where(empty_b[:, None], narrow(b_a, kind), merged)
    merged = tl.where(empty_a[:, None], narrow(b_b, kind), merged)
    nothing = empty_a & empty_b
    merged = tl.where(nothing[:, None], tl.zeros((ROWS, BLOCK_D), kind), merged)
    # Threads of two warps may hold the same row: all must have read before any writes over it (out and lse in place).
    tl.debug_barrier()
    tl.store(row_pointers(out, token * out_stride_token + head * out_stride_head, i_column, VECTOR), merged, mask=mask)
    b_lse = tl.where(empty_b, b_lse_a, tl.where(empty_a, b_lse_b, top + tl.log(total)))
    b_lse = tl.where(nothing, float("-inf"), b_lse)
    p_lse = float32_at(lse) + token * lse_stride_token + head * lse_stride_head
    tl.store(p_lse, b_lse, mask=m_row & (lse != 0))


def merge_attention_states(out, lse, out_a, lse_a, out_b, lse_b) -> None:
    num_tokens, num_heads, head_dim = out.shape
    if out.numel() == 0:
        return
    block_d = padded_head_dim(head_dim)
    num_rows = num_tokens * num_heads
    rows = min(TILE_ELEMENTS // block_d, max(8, next_power_of_2(num_rows)))
    args = (
        out, address(lse), out_a, lse_a, out_b, lse_b, *out.stride()[:2],
        *(lse.stride() if lse is not None else (0, 0)), *out_a.stride()[:2], *lse_a.stride(), *out_b.stride()[:2],
        *lse_b.stride(), num_rows, num_heads, head_dim // 8, vector_bytes(out, out_a, out_b), rows, block_d,
    )  # fmt: skip
    launch(merge_attention_states_kernel, (cdiv(num_rows, rows),), args, by_address=(lse,), num_warps=4)
