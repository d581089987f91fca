"""paged_attention and merge_attention_states, one query row at a time in float64."""

import math

import torch

from pagedkern.reference.cache import check_scales, dequantise

INF = math.inf


def live_range(query_pos: int, seq_len: int, causal: bool, window_left: int, window_right: int) -> tuple[int, int]:
    """The keys [first, last) that a query at query_pos sees. A window is a stretch, so every mask is one."""
    first, last = 0, seq_len
    if window_left >= 0:
        first = max(first, query_pos - window_left)
    if window_right >= 0:
        last = min(last, query_pos + window_right + 1)
    if causal:
        last = min(last, query_pos + 1)
    return (first, last) if first < last else (0, 0)


def attend(query, keys, values, distance, scale, softcap, alibi_slopes, sinks):
    """One row: query [heads, d], keys and values [n, kv_heads, d], distance [n] = key_pos - query_pos; all float64.

    Returns out [heads, d] and lse [heads].
    """
    num_heads, num_kv_heads = query.size(0), keys.size(1)
    keys = keys.repeat_interleave(num_heads // num_kv_heads, 1)
    values = values.repeat_interleave(num_heads // num_kv_heads, 1)
    scores = scale * torch.einsum("hd,nhd->hn", query, keys)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.double()[:, None] * distance.double()
    logits = scores if sinks is None else torch.cat([scores, sinks.double()[:, None]], 1)
    lse = torch.logsumexp(logits, 1)
    if keys.size(0) == 0:
        return torch.zeros_like(query), lse
    weights = torch.softmax(logits, 1)[:, : keys.size(0)]
    weights = torch.where(lse[:, None] == -INF, 0.0, weights)  # every score -inf: as if no key were live
    # A weight of exactly zero drops its value, as a mask would: 0 * inf is not NaN here.
    products = torch.where(weights[:, :, None] == 0, 0.0, weights[:, :, None] * values.transpose(0, 1))
    return products.sum(1), lse


def paged_attention(
    query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q=None, *, scale, causal=True, window_left=-1,
    window_right=-1, softcap=0.0, alibi_slopes=None, sinks=None, k_scale=None, v_scale=None,
):  # fmt: skip
    """float64 (out [num_tokens, num_heads, head_dim], lse [num_tokens, num_heads]); NaN in padding rows."""
    check_scales(key_cache, k_scale=k_scale, v_scale=v_scale)
    block_size = key_cache.size(1)
    lengths = seq_lens.tolist()
    starts = list(range(len(lengths) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    out = torch.full(query.shape, math.nan, dtype=torch.float64, device=query.device)
    lse = torch.full(query.shape[:2], math.nan, dtype=torch.float64, device=query.device)
    for seq, seq_len in enumerate(lengths):
        rows = range(starts[seq], starts[seq + 1])
        # Aligned to the bottom right: the last query row is the last key.
        query_pos = [seq_len - len(rows) + i for i in range(len(rows))]
        ranges = [live_range(pos, seq_len, causal, window_left, window_right) for pos in query_pos]
        live = [r for r in ranges if r[0] < r[1]]
        first, last = (min(r[0] for r in live), max(r[1] for r in live)) if live else (0, 0)
        position = torch.arange(first, last, device=query.device)
        blocks = block_table[seq].long()[position // block_size]
        keys = dequantise(key_cache, k_scale, blocks, position % block_size)
        values = dequantise(value_cache, v_scale, blocks, position % block_size)
        for row, pos, (begin, end) in zip(rows, query_pos, ranges, strict=True):
            seen = slice(begin - first, end - first) if begin < end else slice(0, 0)
            out[row], lse[row] = attend(
                query[row].double(), keys[seen], values[seen], position[seen] - pos, scale, softcap, alibi_slopes, sinks
            )
    return out, lse


def merge_attention_states(out_a, lse_a, out_b, lse_b):
    """float64 (out, lse). A part whose lse is -inf or +inf is empty, whatever its values."""
    parts = [(out_a.double(), lse_a.double()), (out_b.double(), lse_b.double())]
    empty = [lse.isinf() for _, lse in parts]
    lses = torch.stack([torch.where(gone, -INF, lse) for gone, (_, lse) in zip(empty, parts, strict=True)])
    lse = torch.logsumexp(lses, 0)
    out = torch.zeros_like(parts[0][0])
    for gone, part_lse, (values, _) in zip(empty, lses, parts, strict=True):
        weight = torch.exp(part_lse - torch.where(lse.isinf(), 0.0, lse))
        out += torch.where(gone[..., None], 0.0, weight[..., None] * values)
    # The weight of the only part is exactly 1, but exp(x - logsumexp(x, -inf)) may not be.
    for this, other in ((0, 1), (1, 0)):
        only = empty[other] & ~empty[this]
        out = torch.where(only[..., None], parts[this][0], out)
        lse = torch.where(only, parts[this][1], lse)
    return out, lse
