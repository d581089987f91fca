"""rope_reshape_and_cache: query and key turned to their positions in place, then key and value to their slots."""

import triton
import triton.language as tl

from .cache_write import load_scale, next_owned, owned_tokens, plan, store_rows
from .common import as_stored, kernel, launch, narrow, next_power_of_2, row_pointers, scale_args, vector_bytes, wide
from .fp8 import format_of


@triton.jit
def rotate(rows, o_row, i_first, i_second, mask, cosine, sine):
    """Turns the pairs (first, second) of the rows at o_row [ROWS] in place, in float32; the rounded results."""
    p_first, p_second = rows + o_row[:, None] + i_first[None, :], rows + o_row[:, None] + i_second[None, :]
    first, second = tl.load(p_first, mask=mask, other=0.0), tl.load(p_second, mask=mask, other=0.0)
    x, y = wide(first), wide(second)
    turned_x = narrow(x * cosine[None, :] - y * sine[None, :], first.dtype)
    turned_y = narrow(y * cosine[None, :] + x * sine[None, :], first.dtype)
    tl.store(p_first, turned_x, mask=mask)
    tl.store(p_second, turned_y, mask=mask)
    return turned_x, turned_y


@kernel
def rope_reshape_and_cache_kernel(
    query, key, value, key_cache, value_cache, positions, cos_sin_cache, slots,
    query_stride_token: tl.int64, query_stride_head: tl.int64,
    key_stride_token: tl.int64, key_stride_head: tl.int64, value_stride_token: tl.int64, value_stride_head: tl.int64,
    kc_stride_block: tl.int64, kc_stride_token: tl.int64, kc_stride_head: tl.int64,
    vc_stride_block: tl.int64, vc_stride_token: tl.int64, vc_stride_head: tl.int64,
    k_scale: tl.int64, ks_stride_block: tl.int64, ks_stride_token: tl.int64, ks_stride_head: tl.int64,
    v_scale: tl.int64, vs_stride_block: tl.int64, vs_stride_token: tl.int64, vs_stride_head: tl.int64,
    position_stride: tl.int64, cos_sin_stride: tl.int64,
    slot_stride: tl.int64, num_slots: tl.int64, num_cache_slots: tl.int64, block_size: tl.int64,
    num_heads: tl.int32, num_kv_heads: tl.int32, head_dim_by_8: tl.int32, half: tl.int32, interleaved: tl.int32,
    FORMAT: tl.constexpr, VECTOR_ROW: tl.constexpr, VECTOR_CACHE: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    i_entry = tl.arange(0, CHUNK)
    i_column = tl.arange(0, BLOCK_D)
    i_pair = tl.arange(0, BLOCK_HALF)
    m_column = i_column < head_dim_by_8 * 8
    m_pair = i_pair < half
    i_first = tl.where(interleaved != 0, 2 * i_pair, i_pair)
    i_second = tl.where(interleaved != 0, 2 * i_pair + 1, i_pair + half)
    for chunk in range(0, num_slots, CHUNK):
        mine = owned_tokens(slots, slot_stride, num_slots, num_cache_slots, chunk, i_entry, True)
        entry = next_owned(mine, i_entry, -1, CHUNK)
        while entry < CHUNK:
            token = chunk + entry
            slot = tl.load(slots + token * slot_stride).to(tl.int64)
            stored = (slot >= 0) & (slot < num_cache_slots)
            block = slot // block_size
            offset = slot - block * block_size
            angle = cos_sin_cache + tl.load(positions + token * position_stride).to(tl.int64) * cos_sin_stride
            cosine = tl.load(angle + i_pair, mask=m_pair, other=0.0).to(tl.float32)
            sine = tl.load(angle + half + i_pair, mask=m_pair, other=0.0).to(tl.float32)
            for first in range(0, num_heads, ROWS):
                head = (first + tl.arange(0, ROWS)).to(tl.int64)
                o_query = token * query_stride_token + head * query_stride_head
                rotate(query, o_query, i_first, i_second, (head < num_heads)[:, None] & m_pair[None, :], cosine, sine)
            for first in range(0, num_kv_heads, ROWS):
                head = (first + tl.arange(0, ROWS)).to(tl.int64)
                m_head = head < num_kv_heads
                o_key = token * key_stride_token + head * key_stride_head
                m_turned = m_head[:, None] & m_pair[None, :]
                b_first, b_second = rotate(key, o_key, i_first, i_second, m_turned, cosine, sine)
                m_row = (m_head & stored)[:, None] & m_column[None, :]
                m_rest = m_row & (i_column >= 2 * half)[None, :]
                b_rest = tl.load(row_pointers(key, o_key, i_column, VECTOR_ROW), mask=m_rest)
                o_value = token * value_stride_token + head * value_stride_head
                b_value = tl.load(row_pointers(value, o_value, i_column, VECTOR_ROW), mask=m_row)
                o_ks = block * ks_stride_block + offset * ks_stride_token + head * ks_stride_head
                o_vs = block * vs_stride_block + offset * vs_stride_token + head * vs_stride_head
                b_ks, b_vs = load_scale(k_scale, o_ks, m_head & stored), load_scale(v_scale, o_vs, m_head & stored)
                o_kc = block * kc_stride_block + offset * kc_stride_token + head * kc_stride_head
                o_vc = block * vc_stride_block + offset * vc_stride_token + head * vc_stride_head
                store_rows(b_first, key_cache, o_kc, i_first, m_turned & stored, b_ks, FORMAT, 1)
                store_rows(b_second, key_cache, o_kc, i_second, m_turned & stored, b_ks, FORMAT, 1)
                store_rows(b_rest, key_cache, o_kc, i_column, m_rest, b_ks, FORMAT, VECTOR_CACHE)
                store_rows(b_value, value_cache, o_vc, i_column, m_row, b_vs, FORMAT, VECTOR_CACHE)
            entry = next_owned(mine, i_entry, entry, CHUNK)


def rope_reshape_and_cache(
    query, key, value, key_cache, value_cache, positions, cos_sin_cache, slot_mapping, interleaved=False,
    k_scale=None, v_scale=None,
) -> None:  # fmt: skip
    num_slots, (num_blocks, block_size, num_kv_heads, head_dim) = slot_mapping.numel(), key_cache.shape
    if num_slots == 0:
        return
    num_heads, half = query.size(1), cos_sin_cache.size(1) // 2
    sizes = plan(num_slots, num_kv_heads, head_dim)
    args = (
        query, key, value, as_stored(key_cache), as_stored(value_cache), positions, cos_sin_cache, slot_mapping,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3],
        *value_cache.stride()[:3], *scale_args(k_scale), *scale_args(v_scale), positions.stride(0),
        cos_sin_cache.stride(0), slot_mapping.stride(0), num_slots, num_blocks * block_size, block_size, num_heads,
        num_kv_heads, head_dim // 8, half, int(interleaved), format_of(key_cache), vector_bytes(key, value),
        vector_bytes(key_cache, value_cache), sizes.chunk, sizes.rows, sizes.block_d,
        max(32, next_power_of_2(half)),
    )  # fmt: skip
    launch(rope_reshape_and_cache_kernel, (sizes.programs,), args, by_address=(k_scale, v_scale), num_warps=1)
