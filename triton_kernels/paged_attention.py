"""paged_attention: decode, verify, chunked prefill and mixed batches in one launch, and one more to combine splits.

A program takes one tile of query rows (tokens x query heads of one KV head) and one range of key blocks.
"""

import functools

import torch
import triton
import triton.language as tl

from .attention_combine import add_sink, paged_attention_combine_kernel
from .attention_plan import Plan, config_of, fit, partial_bytes, plan
from .attention_schedule import LARGE, SMALL, chunk_of_batch, find_item, lengths, splits_of, work_of
from .cache_write import load_scale
from .common import (
    INTERPRETING,
    address,
    as_stored,
    converts_fp8,
    float32_at,
    kernel,
    launch,
    narrow,
    num_processors,
    padded_head_dim,
    row_pointers,
    scale_args,
    shared_memory,
    vector_bytes,
)
from .fp8 import IS_PLAIN, PLAIN, decode_pairs, format_of, into_half_range, widen

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
EXACT = tl.constexpr(2.0**20)  # larger scores, to base 2, are too coarse for what is added to them
UNBOUNDED = 2**30  # a window longer than any sequence
HEADROOM = tl.constexpr(14.0)  # float16 weights are kept below 2^14, so that small ones stay above its subnormals
ALIGNMENT = 64  # bytes; a caller's workspace may start anywhere


@triton.jit
def multiply(a, b):
    """a @ b in float32. The interpreter multiplies the bits of bfloat16 as integers: there in float32."""
    if INTERPRETING:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def base_of(b_max, HEADROOM: tl.constexpr):
    """What weights are relative to: the maximum, less the headroom where float32 takes that off exactly (-inf: not)."""
    if HEADROOM == 0.0:
        return b_max
    else:
        return tl.where(tl.abs(b_max) < EXACT, b_max - HEADROOM, b_max)


@triton.jit
def store_partial(partials, p_row, num_rows, b_out, b_max, b_sum, head_dim, i_d, m_row):
    """A split's sums, and behind all of them what they are relative to, then their weights: not one lse of the two,
    whose rounding would be more than an exponent where scores are large."""
    base = float32_at(partials)
    m_out = m_row[:, None] & (i_d < head_dim)[None, :]
    tl.store(row_pointers(base, p_row * head_dim, i_d, 16), b_out, mask=m_out)
    base += num_rows * head_dim + p_row
    tl.store(base, b_max, mask=m_row)
    tl.store(base + num_rows, b_sum, mask=m_row)


@triton.jit
def store_result(
    out, o_out, lse, o_lse, sinks, head, b_out, b_max, b_sum, i_d, m_row, m_out, VECTOR: tl.constexpr
):  # fmt: skip
    """Out and lse of rows whose keys were not split; a sink is one more logit without a value."""
    shrink, total, b_top = add_sink(b_max, b_sum, float32_at(sinks) + head, m_row & (sinks != 0))
    b_out = b_out * (shrink / tl.where(total > 0, total, 1.0))[:, None]
    tl.store(row_pointers(out, o_out, i_d, VECTOR), narrow(b_out, out.dtype.element_ty), mask=m_out)
    b_lse = tl.where(total > 0, (b_top + tl.log2(total)) * LN2, float("-inf"))
    tl.store(float32_at(lse) + o_lse, b_lse, mask=m_row & (lse != 0))


@triton.jit
def attend(
    query, key_cache, value_cache, out, block_table, lse, partials, tile, kv_head, first_token, q_len, seq_len,
    begin_block, end_block, partial_row, is_split,
    alibi_slopes, sinks, k_scale, v_scale, table_row,
    query_stride_token, query_stride_head, out_stride_token, out_stride_head, lse_stride_token, lse_stride_head,
    kc_stride_block, kc_stride_token, vc_stride_block, vc_stride_token,
    ks_stride_block, ks_stride_token, vs_stride_block, vs_stride_token,
    group, num_heads, num_kv_heads, head_dim, block_size, block_shift, window_left, window_right, scale, softcap,
    num_partial_rows,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE_D: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, TOKEN_SCALES: tl.constexpr, EXTRAS: tl.constexpr,
    VECTOR_ROW: tl.constexpr, VECTOR: tl.constexpr, PAGE_SHIFT: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """One tile over the key blocks begin_block..end_block of its sequence."""
    # Small tiles multiply second operands from registers: FP8 elements are loaded by twos, as 16 bits, for what moves
    # matrices from shared memory, and the first and the second of each two are multiplied apart.
    PAIRED: tl.constexpr = NATIVE and VECTOR > 1 and BLOCK_M == SMALL
    if PAIRED:
        pair = tl.pointer_type(tl.int16)
        key_cache, value_cache = key_cache.to(pair, bitcast=True), value_cache.to(pair, bitcast=True)
        kc_stride_block, kc_stride_token = kc_stride_block // 2, kc_stride_token // 2
        vc_stride_block, vc_stride_token = vc_stride_block // 2, vc_stride_token // 2
    i_d = tl.arange(0, BLOCK_D)
    i_n = tl.arange(0, BLOCK_N)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = row < q_len * group
    token = row // group
    head = (kv_head * group + row % group).to(tl.int64)
    m_d = i_d < head_dim
    o_query = (first_token + token).to(tl.int64) * query_stride_token + head * query_stride_head
    m_query = m_row[:, None] if WHOLE_D else m_row[:, None] & m_d[None, :]
    b_query = tl.load(row_pointers(query, o_query, i_d, VECTOR_ROW), mask=m_query, other=0.0)
    kind: tl.constexpr = query.dtype.element_ty if FORMAT == IS_PLAIN else tl.float16
    if FORMAT != IS_PLAIN:
        b_query, unshift = into_half_range(b_query)
        scale = unshift[:, None] * scale
    i_column = tl.arange(0, BLOCK_D // 2 if PAIRED else BLOCK_D)
    m_column = i_column < (head_dim // 2 if PAIRED else head_dim)
    if PAIRED:
        b_query, b_query_odd = tl.split(tl.reshape(b_query, (BLOCK_M, BLOCK_D // 2, 2)))
        b_query_odd = b_query_odd.to(kind)
    b_query = b_query.to(kind)

    # Keys that a row sees, low..high; positions are aligned to the bottom right. Then those that some row sees.
    position = seq_len - q_len + token
    low = tl.where(position > window_left, position - window_left, 0)
    high = tl.minimum(position + tl.minimum(window_right, seq_len - 1 - position), seq_len - 1)
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // group, q_len - 1)
    first_position = seq_len - q_len + tile * BLOCK_M // group
    last_position = seq_len - q_len + last_token
    first_key = tl.where(first_position > window_left, first_position - window_left, 0)
    end_key = last_position + tl.minimum(window_right, seq_len - 1 - last_position) + 1
    begin_block = tl.maximum(begin_block, first_key // BLOCK_N)
    end_block = tl.minimum(end_block, (tl.maximum(end_key, 0) + BLOCK_N - 1) // BLOCK_N)

    if EXTRAS:
        slopes = float32_at(alibi_slopes)
        slope = tl.load(slopes + head, mask=m_row & (alibi_slopes != 0), other=0.0) * LOG2E
    else:
        scale = scale * LOG2E
    headroom: tl.constexpr = HEADROOM if kind == tl.float16 else 0.0
    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_out = tl.zeros((BLOCK_M, BLOCK_D // 2 if PAIRED else BLOCK_D), tl.float32)
    if PAIRED:
        b_out_odd = b_out
    for block in range(begin_block, end_block):
        key = block * BLOCK_N + i_n
        m_key = (key >= first_key) & (key < end_key)
        if PAGE_SHIFT:
            column = key >> block_shift
            offset = (key & (block_size - 1)).to(tl.int64)
        else:
            column = key // block_size
            offset = (key - column * block_size).to(tl.int64)
        page = tl.load(table_row + column, mask=m_key, other=0).to(tl.int64)
        m_tile = m_key[:, None] if WHOLE_D else m_key[:, None] & m_column[None, :]
        o_key = page * kc_stride_block + offset * kc_stride_token
        # One address for both where their strides are equal, as they nearly always are.
        o_value = o_key if SAME_STRIDES else page * vc_stride_block + offset * vc_stride_token
        p_key = row_pointers(key_cache, o_key, i_column, VECTOR)
        p_value = row_pointers(value_cache, o_value, i_column, VECTOR)
        b_key = tl.trans(tl.load(p_key, mask=m_tile, other=0))
        if PAIRED:
            b_score = multiply(b_query, decode_pairs(b_key, FORMAT, False))
            b_score += multiply(b_query_odd, decode_pairs(b_key, FORMAT, True))
        else:
            b_score = multiply(b_query, widen(b_key, FORMAT, NATIVE))
        b_score *= scale
        if TOKEN_SCALES:
            o_key_scale = page * ks_stride_block + offset * ks_stride_token
            b_score *= load_scale(k_scale, o_key_scale, m_key)[None, :]
        if EXTRAS:
            if softcap > 0:
                # tanh by one exponential, of any size without overflow; near 0, where that cancels, by its series
                b_part = b_score / softcap
                b_square = b_part * b_part
                b_far = 1.0 - 2.0 / (tl.exp2(b_part * (2.0 * LOG2E)) + 1.0)
                b_near = b_part * (1.0 + b_square * (-1.0 / 3.0 + b_square * (2.0 / 15.0)))
                b_score = softcap * tl.where(tl.abs(b_part) < 0.04, b_near, b_far)
            b_score = b_score * LOG2E + slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
        b_score = tl.where((key[None, :] >= low[:, None]) & (key[None, :] <= high[:, None]), b_score, float("-inf"))
        if TOKEN_SCALES:
            # b_max follows score + log2(scale), so that scaled weights keep their range at any scale; where scores are
            # so large that rounding would swallow the scale's part, the score.
            o_value_scale = page * vs_stride_block + offset * vs_stride_token
            by_token = load_scale(v_scale, o_value_scale, m_key)
            b_scaled = tl.where(tl.abs(b_score) < EXACT, b_score + tl.log2(by_token)[None, :], b_score)
            b_top = tl.maximum(b_max, tl.max(b_scaled, 1))
        else:
            b_top = tl.maximum(b_max, tl.max(b_score, 1))
        b_base = base_of(b_top, headroom)
        guard = tl.where(b_base == float("-inf"), 0.0, b_base)
        b_weight = tl.exp2(b_score - guard[:, None])
        shrink = tl.exp2(base_of(b_max, headroom) - guard)
        b_sum = b_sum * shrink + tl.sum(b_weight, 1)
        b_max = b_top
        if TOKEN_SCALES:
            b_weight *= by_token[None, :]
        b_value = tl.load(p_value, mask=m_tile, other=0)
        b_weight = narrow(b_weight, kind)
        if PAIRED:
            b_out = b_out * shrink[:, None] + multiply(b_weight, decode_pairs(b_value, FORMAT, False))
            b_out_odd = b_out_odd * shrink[:, None] + multiply(b_weight, decode_pairs(b_value, FORMAT, True))
        else:
            b_out = b_out * shrink[:, None] + multiply(b_weight, widen(b_value, FORMAT, NATIVE))
    if PAIRED:
        b_out = tl.reshape(tl.join(b_out, b_out_odd), (BLOCK_M, BLOCK_D))
    b_max = base_of(b_max, headroom)
    if FORMAT != IS_PLAIN and not TOKEN_SCALES:
        b_out *= tl.load(float32_at(v_scale), mask=v_scale != 0, other=1.0)

    if is_split:
        p_row = (partial_row + row).to(tl.int64) * num_kv_heads + kv_head
        store_partial(partials, p_row, num_partial_rows * num_kv_heads, b_out, b_max, b_sum, head_dim, i_d, m_row)
    else:
        # Worked out again, by another way: kept over the loop these would cost registers that spill.
        again = num_heads // num_kv_heads
        token = row // again
        head = (kv_head * again + row - token * again).to(tl.int64)
        m_row = token < q_len
        m_query = m_row[:, None] if WHOLE_D else m_row[:, None] & m_d[None, :]
        o_token = (first_token + token).to(tl.int64)
        o_out = o_token * out_stride_token + head * out_stride_head
        o_lse = o_token * lse_stride_token + head * lse_stride_head
        store_result(out, o_out, lse, o_lse, sinks, head, b_out, b_max, b_sum, i_d, m_row, m_query, VECTOR_ROW)


@kernel
def paged_attention_kernel(
    query, key_cache, value_cache, out, block_table, seq_lens,
    cu_seqlens_q: tl.int64, alibi_slopes: tl.int64, sinks: tl.int64, lse: tl.int64, partials: tl.int64,
    query_stride_token: tl.int64, query_stride_head: tl.int64, out_stride_token: tl.int64, out_stride_head: tl.int64,
    lse_stride_token: tl.int64, lse_stride_head: tl.int64,
    kc_stride_block: tl.int64, kc_stride_token: tl.int64, kc_stride_head: tl.int64,
    vc_stride_block: tl.int64, vc_stride_token: tl.int64, vc_stride_head: tl.int64,
    k_scale: tl.int64, ks_stride_block: tl.int64, ks_stride_token: tl.int64, ks_stride_head: tl.int64,
    v_scale: tl.int64, vs_stride_block: tl.int64, vs_stride_token: tl.int64, vs_stride_head: tl.int64,
    table_stride: tl.int64, num_seqs: tl.int32, group: tl.int32, num_heads: tl.int32, num_kv_heads: tl.int32,
    head_dim_by_8: tl.int32, block_size: tl.int32, block_shift: tl.int32, window_left: tl.int32, window_right: tl.int32,
    num_splits: tl.int32, target: tl.int32, direct: tl.int32, num_partial_rows: tl.int64,
    scale: tl.float32, softcap: tl.float32,
    HAS_LARGE: tl.constexpr, BLOCK_N: tl.constexpr, LARGE_N: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE_D: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, TOKEN_SCALES: tl.constexpr, EXTRAS: tl.constexpr,
    VECTOR_ROW: tl.constexpr, VECTOR: tl.constexpr, PAGE_SHIFT: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) // num_kv_heads
    kv_head = tl.program_id(0) - item * num_kv_heads
    chunk = chunk_of_batch(seq_lens, cu_seqlens_q, num_seqs, group, window_left, num_splits, target, BLOCK_N)
    seq, index, partial_row = find_item(
        item, direct, seq_lens, cu_seqlens_q, num_seqs, group, window_left, num_splits, chunk, BLOCK_N
    )
    if seq < num_seqs:
        first_token, q_len, seq_len = lengths(seq, seq < num_seqs, seq_lens, cu_seqlens_q)
        _, first_block, blocks = work_of(q_len, seq_len, group, window_left, BLOCK_N)
        splits, each = splits_of(q_len, blocks, num_splits, chunk)
        tile = index // splits
        split = index - tile * splits
        begin_block = first_block + split * each
        end_block = begin_block + tl.minimum(each, blocks - split * each)
        partial_row += split * q_len * group
        table_row = block_table + seq.to(tl.int64) * table_stride
        key_cache += kv_head * kc_stride_head
        value_cache += kv_head * vc_stride_head
        head_dim = BLOCK_D if WHOLE_D else head_dim_by_8 * 8
        if TOKEN_SCALES:
            k_scale += tl.where(k_scale != 0, kv_head * ks_stride_head * 4, 0)
            v_scale += tl.where(v_scale != 0, kv_head * vs_stride_head * 4, 0)
        elif FORMAT != IS_PLAIN:
            p_scale = float32_at(k_scale) + kv_head * ks_stride_head
            scale *= tl.load(p_scale, mask=k_scale != 0, other=1.0)
            v_scale += tl.where(v_scale != 0, kv_head * vs_stride_head * 4, 0)
        if HAS_LARGE and q_len * group > SMALL:
            STEPS: tl.constexpr = BLOCK_N // LARGE_N
            attend(
                query, key_cache, value_cache, out, block_table, lse, partials, tile, kv_head, first_token, q_len,
                seq_len, begin_block * STEPS, end_block * STEPS, partial_row, splits > 1,
                alibi_slopes, sinks, k_scale, v_scale,
                table_row, query_stride_token, query_stride_head, out_stride_token, out_stride_head,
                lse_stride_token, lse_stride_head, kc_stride_block, kc_stride_token, vc_stride_block, vc_stride_token,
                ks_stride_block, ks_stride_token, vs_stride_block, vs_stride_token, group, num_heads, num_kv_heads,
                head_dim, block_size, block_shift, window_left, window_right, scale, softcap, num_partial_rows,
                LARGE, LARGE_N, BLOCK_D, WHOLE_D, FORMAT, NATIVE, TOKEN_SCALES, EXTRAS, VECTOR_ROW, VECTOR, PAGE_SHIFT,
                SAME_STRIDES,
            )  # fmt: skip
        else:
            attend(
                query, key_cache, value_cache, out, block_table, lse, partials, tile, kv_head, first_token, q_len,
                seq_len, begin_block, end_block, partial_row, splits > 1, alibi_slopes, sinks, k_scale, v_scale,
                table_row, query_stride_token, query_stride_head, out_stride_token, out_stride_head,
                lse_stride_token, lse_stride_head, kc_stride_block, kc_stride_token, vc_stride_block, vc_stride_token,
                ks_stride_block, ks_stride_token, vs_stride_block, vs_stride_token, group, num_heads, num_kv_heads,
                head_dim, block_size, block_shift, window_left, window_right, scale, softcap, num_partial_rows,
                SMALL, BLOCK_N, BLOCK_D, WHOLE_D, FORMAT, NATIVE, TOKEN_SCALES, EXTRAS, VECTOR_ROW, VECTOR, PAGE_SHIFT,
                SAME_STRIDES,
            )  # fmt: skip


def _window(keys: int) -> int:
    return UNBOUNDED if keys < 0 else min(keys, UNBOUNDED)


@functools.cache
def _config(device: torch.device, head_dim: int, itemsize: int):
    return config_of(head_dim, itemsize, shared_memory(device))


def _plan(query, key_cache, seq_lens, max_seqlen_q, max_seqlen_k, num_splits, block_n) -> Plan:
    num_tokens, num_heads, _ = query.shape
    return plan(
        num_tokens, num_heads, key_cache.size(2), seq_lens.size(0), max_seqlen_q, max_seqlen_k, num_splits,
        num_processors(query.device), block_n,
    )  # fmt: skip


def _partials(chosen: Plan, workspace, num_kv_heads, head_dim, group, device) -> tuple[Plan, torch.Tensor | None]:
    """Room for partial results, and the plan that fits a given one."""
    need = partial_bytes(chosen.partial_rows, num_kv_heads, head_dim)
    if workspace is None:
        return chosen, torch.empty(need, dtype=torch.uint8, device=device) if need else None
    skipped = -workspace.data_ptr() % ALIGNMENT
    fitted = fit(chosen, max(workspace.numel() - skipped, 0), num_kv_heads, head_dim, group)
    if fitted is None:
        raise RuntimeError(
            "paged_attention: workspace must have at least paged_attention_workspace_size(...)="
            f"{need + ALIGNMENT - 1} bytes, got {workspace.numel()}"
        )
    return fitted, workspace[skipped:]


def paged_attention(
    out, query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, scale,
    causal=True, window_left=-1, window_right=-1, softcap=0.0, alibi_slopes=None, sinks=None, k_scale=None,
    v_scale=None, lse=None, num_splits=0, workspace=None,
) -> None:  # fmt: skip
    (num_tokens, num_heads, head_dim), num_kv_heads, num_seqs = query.shape, key_cache.size(2), seq_lens.size(0)
    if num_tokens == 0 or num_seqs == 0:
        return
    group, form = num_heads // num_kv_heads, format_of(key_cache)
    config = _config(query.device, head_dim, key_cache.element_size())
    chosen = _plan(query, key_cache, seq_lens, max_seqlen_q, max_seqlen_k, num_splits, config.block_n)
    chosen, partials = _partials(chosen, workspace, num_kv_heads, head_dim, group, query.device)
    native = form != PLAIN and converts_fp8(query.device)
    left, right = _window(window_left), 0 if causal else _window(window_right)
    lse_strides = lse.stride() if lse is not None else (0, 0)
    token_scales = any(s is not None and s.dim() == 3 for s in (k_scale, v_scale))
    block_d, page = padded_head_dim(head_dim), min(key_cache.size(1), UNBOUNDED)
    by_address = (cu_seqlens_q, alibi_slopes, sinks, k_scale, v_scale, lse, partials)
    args = (
        query, as_stored(key_cache), as_stored(value_cache), out, block_table, seq_lens, address(cu_seqlens_q),
        address(alibi_slopes), address(sinks), address(lse), address(partials), *query.stride()[:2], *out.stride()[:2],
        *lse_strides, *key_cache.stride()[:3], *value_cache.stride()[:3], *scale_args(k_scale), *scale_args(v_scale),
        block_table.stride(0), num_seqs, group, num_heads, num_kv_heads, head_dim // 8, page, page.bit_length() - 1,
        left, right, chosen.num_splits, chosen.target, int(chosen.direct), chosen.partial_rows, scale, softcap,
        chosen.has_large, config.block_n, config.large_n, block_d, block_d == head_dim, form, native, token_scales,
        softcap > 0 or alibi_slopes is not None, vector_bytes(query, out), vector_bytes(key_cache, value_cache),
        page & (page - 1) == 0, key_cache.stride()[:2] == value_cache.stride()[:2],
    )  # fmt: skip
    launch(
        paged_attention_kernel, (chosen.items * num_kv_heads,), args, by_address=by_address,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if chosen.partial_rows == 0:
        return
    args = (
        out, seq_lens, address(cu_seqlens_q), address(sinks), address(lse), address(partials), *out.stride()[:2],
        *lse_strides, num_seqs, chosen.split_tokens, group, num_kv_heads, head_dim // 8, left, chosen.num_splits,
        chosen.target, chosen.partial_rows, config.block_n, vector_bytes(out), block_d,
    )  # fmt: skip
    grid = (num_seqs * chosen.split_tokens * num_kv_heads,)
    launch(paged_attention_combine_kernel, grid, args, by_address=by_address, num_warps=1)


def workspace_size(
    num_tokens, num_heads, num_kv_heads, head_dim, num_seqs, max_seqlen_q, max_seqlen_k, num_splits, processors
) -> int:  # fmt: skip
    """Bytes that hold the partial results of any device's config, wherever the tensor starts."""
    chosen = plan(
        num_tokens, num_heads, num_kv_heads, num_seqs, max_seqlen_q, max_seqlen_k, num_splits, processors, 16
    )  # fmt: skip
    need = partial_bytes(chosen.partial_rows, num_kv_heads, head_dim)
    return need + ALIGNMENT - 1 if need else 0
