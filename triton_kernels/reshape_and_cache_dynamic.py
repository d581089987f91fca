"""reshape_and_cache_dynamic: FP8 with one scale per token and head, of the largest finite element."""

import triton
import triton.language as tl

from .cache_write import next_owned, owned_tokens, plan, store_rows
from .common import as_stored, kernel, launch, row_pointers, vector_bytes, wide
from .fp8 import LARGEST, format_of


@triton.jit
def dynamic_scale(tile, LARGEST: tl.constexpr):
    """float32 [ROWS] of tile [ROWS, BLOCK_D], zeros where it is masked."""
    size = tl.abs(wide(tile))
    amax = tl.max(tl.where(size < float("inf"), size, 0.0), 1)  # NaN compares false
    return tl.div_rn(tl.maximum(amax, 1e-10), LARGEST)


@kernel
def reshape_and_cache_dynamic_kernel(
    key, value, key_cache, value_cache, k_scale, v_scale, slots,
    key_stride_token: tl.int64, key_stride_head: tl.int64, value_stride_token: tl.int64, value_stride_head: tl.int64,
    kc_stride_block: tl.int64, kc_stride_token: tl.int64, kc_stride_head: tl.int64,
    vc_stride_block: tl.int64, vc_stride_token: tl.int64, vc_stride_head: tl.int64,
    ks_stride_block: tl.int64, ks_stride_token: tl.int64, ks_stride_head: tl.int64,
    vs_stride_block: tl.int64, vs_stride_token: tl.int64, vs_stride_head: tl.int64,
    slot_stride: tl.int64, num_slots: tl.int64, num_cache_slots: tl.int64, block_size: tl.int64,
    num_kv_heads: tl.int32, head_dim_by_8: tl.int32,
    FORMAT: tl.constexpr, LARGEST: tl.constexpr, VECTOR_ROW: tl.constexpr, VECTOR_CACHE: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_entry = tl.arange(0, CHUNK)
    i_column = tl.arange(0, BLOCK_D)
    m_column = i_column < head_dim_by_8 * 8
    for chunk in range(0, num_slots, CHUNK):
        mine = owned_tokens(slots, slot_stride, num_slots, num_cache_slots, chunk, i_entry, False)
        entry = next_owned(mine, i_entry, -1, CHUNK)
        while entry < CHUNK:
            token = chunk + entry
            slot = tl.load(slots + token * slot_stride).to(tl.int64)
            block = slot // block_size
            offset = slot - block * block_size
            for first in range(0, num_kv_heads, ROWS):
                head = (first + tl.arange(0, ROWS)).to(tl.int64)
                m_head = head < num_kv_heads
                mask = m_head[:, None] & m_column[None, :]
                o_key = token * key_stride_token + head * key_stride_head
                o_value = token * value_stride_token + head * value_stride_head
                b_key = tl.load(row_pointers(key, o_key, i_column, VECTOR_ROW), mask=mask, other=0.0)
                b_value = tl.load(row_pointers(value, o_value, i_column, VECTOR_ROW), mask=mask, other=0.0)
                b_ks, b_vs = dynamic_scale(b_key, LARGEST), dynamic_scale(b_value, LARGEST)
                o_ks = block * ks_stride_block + offset * ks_stride_token + head * ks_stride_head
                o_vs = block * vs_stride_block + offset * vs_stride_token + head * vs_stride_head
                tl.store(k_scale + o_ks, b_ks, mask=m_head)
                tl.store(v_scale + o_vs, b_vs, mask=m_head)
                o_kc = block * kc_stride_block + offset * kc_stride_token + head * kc_stride_head
                o_vc = block * vc_stride_block + offset * vc_stride_token + head * vc_stride_head
                store_rows(b_key, key_cache, o_kc, i_column, mask, b_ks, FORMAT, VECTOR_CACHE)
                store_rows(b_value, value_cache, o_vc, i_column, mask, b_vs, FORMAT, VECTOR_CACHE)
            entry = next_owned(mine, i_entry, entry, CHUNK)


def reshape_and_cache_dynamic(key, value, key_cache, value_cache, k_scale, v_scale, slot_mapping) -> None:
    num_slots, (num_blocks, block_size, num_kv_heads, head_dim) = slot_mapping.numel(), key_cache.shape
    if num_slots == 0:
        return
    sizes = plan(num_slots, num_kv_heads, head_dim)
    form = format_of(key_cache)
    args = (
        key, value, as_stored(key_cache), as_stored(value_cache), k_scale, v_scale, slot_mapping,
        *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        *k_scale.stride(), *v_scale.stride(), slot_mapping.stride(0), num_slots, num_blocks * block_size, block_size,
        num_kv_heads, head_dim // 8, form, LARGEST[form], vector_bytes(key, value),
        vector_bytes(key_cache, value_cache), sizes.chunk, sizes.rows, sizes.block_d,
    )  # fmt: skip
    launch(reshape_and_cache_dynamic_kernel, (sizes.programs,), args, num_warps=1)
