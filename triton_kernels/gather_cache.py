"""gather_cache: pages to rows of one tensor each for key and value, dequantised in float32 and rounded once."""

import triton
import triton.language as tl

from .cache_write import load_scale
from .common import as_stored, cdiv, kernel, launch, narrow, padded_head_dim, row_pointers, scale_args, vector_bytes
from .fp8 import IS_PLAIN, decode, format_of

TILE_ELEMENTS = 1024  # of each of key and value, of a program and head


@triton.jit
def gather_rows(
    cache, o_cache, rows, o_row, i_column, mask, scale, o_scale, m_token, FORMAT: tl.constexpr,
    VECTOR_CACHE: tl.constexpr, VECTOR_ROW: tl.constexpr,
):  # fmt: skip
    stored = tl.load(row_pointers(cache, o_cache, i_column, VECTOR_CACHE), mask=mask)
    if FORMAT == IS_PLAIN:
        value = stored
    else:
        value = narrow(
            decode(stored, FORMAT).to(tl.float32) * load_scale(scale, o_scale, m_token)[:, None], rows.dtype.element_ty
        )
    tl.store(row_pointers(rows, o_row, i_column, VECTOR_ROW), value, mask=mask)


@kernel
def gather_cache_kernel(
    key, value, key_cache, value_cache, block_table, seq_lens, cu_seqlens,
    key_stride_token: tl.int64, key_stride_head: tl.int64, value_stride_token: tl.int64, value_stride_head: tl.int64,
    kc_stride_block: tl.int64, kc_stride_token: tl.int64, kc_stride_head: tl.int64,
    vc_stride_block: tl.int64, vc_stride_token: tl.int64, vc_stride_head: tl.int64,
    k_scale: tl.int64, ks_stride_block: tl.int64, ks_stride_token: tl.int64, ks_stride_head: tl.int64,
    v_scale: tl.int64, vs_stride_block: tl.int64, vs_stride_token: tl.int64, vs_stride_head: tl.int64,
    table_stride: tl.int64, num_seqs: tl.int32, search_steps: tl.int32, total: tl.int64, block_size: tl.int32,
    num_kv_heads: tl.int32, head_dim_by_8: tl.int32,
    FORMAT: tl.constexpr, VECTOR_ROW: tl.constexpr, VECTOR_CACHE: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    # The last sequence that starts at or before the token: binary search, each row for itself.
    low = tl.zeros((TOKENS,), tl.int32)
    high = low + num_seqs
    for _ in range(search_steps):
        middle = (low + high + 1) // 2
        m_search = (middle < num_seqs) & (low < high)
        starts = tl.load(cu_seqlens + middle, mask=m_search, other=0)
        found = m_search & (starts <= token)
        low = tl.where(found, middle, low)
        high = tl.where(found, high, tl.where(low < high, middle - 1, high))
    position = (token - tl.load(cu_seqlens + low)).to(tl.int32)
    m_token = (token < total) & (position >= 0) & (position < tl.load(seq_lens + low))
    column = position // block_size
    offset = (position - column * block_size).to(tl.int64)
    block = tl.load(block_table + low.to(tl.int64) * table_stride + column, mask=m_token, other=0).to(tl.int64)
    i_column = tl.arange(0, BLOCK_D)
    mask = m_token[:, None] & (i_column < head_dim_by_8 * 8)[None, :]
    for head in range(0, num_kv_heads):  # times strides of 64 bits
        gather_rows(
            key_cache, block * kc_stride_block + offset * kc_stride_token + head * kc_stride_head,
            key, token * key_stride_token + head * key_stride_head, i_column, mask,
            k_scale, block * ks_stride_block + offset * ks_stride_token + head * ks_stride_head, m_token,
            FORMAT, VECTOR_CACHE, VECTOR_ROW,
        )  # fmt: skip
        gather_rows(
            value_cache, block * vc_stride_block + offset * vc_stride_token + head * vc_stride_head,
            value, token * value_stride_token + head * value_stride_head, i_column, mask,
            v_scale, block * vs_stride_block + offset * vs_stride_token + head * vs_stride_head, m_token,
            FORMAT, VECTOR_CACHE, VECTOR_ROW,
        )  # fmt: skip


def gather_cache(
    key, value, key_cache, value_cache, block_table, seq_lens, cu_seqlens, k_scale=None, v_scale=None
) -> None:
    total, num_kv_heads, head_dim = key.shape
    num_seqs = seq_lens.size(0)
    if total == 0 or num_seqs == 0:
        return
    block_d = padded_head_dim(head_dim)
    tokens = TILE_ELEMENTS // block_d
    args = (
        key, value, as_stored(key_cache), as_stored(value_cache), block_table, seq_lens, cu_seqlens,
        *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        *scale_args(k_scale), *scale_args(v_scale), block_table.stride(0), num_seqs, num_seqs.bit_length(), total,
        key_cache.size(1), num_kv_heads, head_dim // 8, format_of(key_cache), vector_bytes(key, value),
        vector_bytes(key_cache, value_cache), tokens, block_d,
    )  # fmt: skip
    launch(gather_cache_kernel, (cdiv(total, tokens),), args, by_address=(k_scale, v_scale), num_warps=1)
