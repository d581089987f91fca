"""One documented function per op, for people.

Each calls torch.ops.pagedkern.* with the same tensors: defaults are added, nothing is copied or cast, and engines may
as well call torch.ops directly.

Shapes: `num_tokens` rows of query or key, `num_heads` query heads, `num_kv_heads` KV heads (num_heads is a multiple of
it), `head_dim` any multiple of 8 up to 256, `num_blocks` pages of `block_size` tokens each.

Dtypes: q, k, v and out are bfloat16 or float16, on the CPU float32 too. A cache has their dtype, or is float8_e4m3fn or
float8_e5m2. Index tensors are int32 where not said otherwise.

Layouts: a cache (`key_cache`, `value_cache`) is `[num_blocks, block_size, num_kv_heads, head_dim]` with any block,
token and head strides and a contiguous last dimension; NHD, HND, `[N, 2, ...]` and K beside V are all only strides
(`pagedkern.kv_layout`). query, key, value and out may have any token and head strides.

Scales (`k_scale`, `v_scale`) belong to FP8 caches: float32 on the cache's device, `[]` or `[1]` for the tensor,
`[num_kv_heads]` per head, `[num_blocks, block_size, num_kv_heads]` per token and head; `stored = saturate(x / scale)`,
`x = stored * scale`. None means 1, each for itself.

Errors: a wrong shape, dtype, device, stride or value raises one RuntimeError that names the op, the argument, what it
got and what it expects, before anything is written. On the CPU the index tensors are looked at too (slots, positions,
lengths, block ids that a query can see), since a wrong one would touch memory that is not the cache's;
`pagedkern.check_mode` looks at everything.
"""

import operator

import torch
from torch import Tensor

from ._library import NAMESPACE

_ops = getattr(torch.ops, NAMESPACE)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes new keys and values into their slots of the paged cache.

    key, value: `[num_tokens, num_kv_heads, head_dim]`. Rows from len(slot_mapping) on are padding and are not read.
    key_cache, value_cache: written in place.
    slot_mapping: `[n]` int64 or int32, n <= num_tokens; slot = block * block_size + offset in the block. A negative
        slot skips its token. A slot beyond the cache raises on the CPU and in check mode, and writes nothing elsewhere.
        Of tokens with the same slot one wins, whole.
    k_scale, v_scale: FP8 caches only. The conversion rounds to nearest even and saturates; NaN stays NaN.
    """
    _ops.reshape_and_cache.default(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


def reshape_and_cache_dynamic(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Writes new keys and values as FP8 with a scale of their own for each token and head.

    key_cache, value_cache: float8_e4m3fn or float8_e5m2, written in place.
    k_scale, v_scale: float32 `[num_blocks, block_size, num_kv_heads]`, any strides, written in place:
        max(amax, 1e-10) / fp8_max over the finite elements of the head's row. The other ops take them as they are.
    slot_mapping and the rest are as in `reshape_and_cache`.
    """
    _ops.reshape_and_cache_dynamic.default(key, value, key_cache, value_cache, k_scale, v_scale, slot_mapping)


def rope_reshape_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Rotates query and key in place (rotary position embedding) and writes key and value into the cache.

    query: `[num_tokens, num_heads, head_dim]`; key, value: `[num_tokens, num_kv_heads, head_dim]`, one dtype.
    positions: `[num_tokens]` int64 or int32, in [0, max_position).
    cos_sin_cache: `[max_position, rotary_dim]` float32 or query's dtype: the cosines, then the sines. Dimensions from
        rotary_dim on are left as they are.
    slot_mapping: as in `reshape_and_cache`. Every row below len(slot_mapping) is rotated, also where its slot is
        negative; later rows are untouched.
    interleaved: rotate the pairs (2i, 2i + 1); else the halves (i, i + rotary_dim / 2).
    Rotation is in float32; the cache gets the key as rounded to its dtype.
    """
    _ops.rope_reshape_and_cache.default(
        query, key, value, key_cache, value_cache, positions, cos_sin_cache, slot_mapping, interleaved, k_scale, v_scale
    )


def paged_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    lse: Tensor | None = None,
    num_splits: int = 0,
    workspace: Tensor | None = None,
) -> None:
    """Attention of a mixed batch (decode, speculative verify, chunked prefill) over the paged cache, written to `out`.

    out, query: `[num_tokens, num_heads, head_dim]`, one dtype; out may not share memory with an input.
    block_table: `[num_seqs, max_blocks]`, the pages of each sequence; entries no query can see are not read.
    seq_lens: `[num_seqs]`, keys stored for the sequence, the current tokens included; 0 gives out 0 and lse -inf.
    cu_seqlens_q: `[num_seqs + 1]`, where each sequence's query rows begin; None: one query row per sequence. Rows past
        the last entry are padding, neither read nor written.
    max_seqlen_q, max_seqlen_k: upper bounds of query rows and keys of any sequence. None: num_tokens (1 where
        cu_seqlens_q is None), and what block_table can hold. A bound that is close lets the backend split better.
    scale: factor on q.k, finite and positive; None: head_dim ** -0.5.
    causal: the last query row is aligned to the last key, also where this is False.
    window_left, window_right: keys before and after the query's own that it sees; -1 is unbounded.
    softcap: cap * tanh(score / cap); 0 is off.
    alibi_slopes: float32 `[num_heads]`; adds slope * (key position - query position).
    sinks: float32 `[num_heads]`; one more logit per head that has no value.
    lse: float32 `[num_tokens, num_heads]`, any strides: the natural logarithm of the softmax's sum, written.
    num_splits: parts a sequence's keys are cut into; 0 lets the backend choose. A pinned number makes a row's result
        independent of the rest of the batch, bit for bit.
    workspace: uint8 `[bytes]` of at least `paged_attention_workspace_size(...)`, with any content; None: the backend
        finds its own. On CUDA that is one per stream, which graphs captured from the stream share: graphs that are to
        run at the same time need workspaces of their own.
    """
    if max_seqlen_q is None:
        max_seqlen_q = 1 if cu_seqlens_q is None else query.shape[0]
    if max_seqlen_k is None:
        max_seqlen_k = min(block_table.shape[1] * key_cache.shape[1], 2**31 - 1)
    if scale is None:
        scale = query.shape[2] ** -0.5
    _ops.paged_attention.default(
        out,
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        cu_seqlens_q,
        max_seqlen_q,
        max_seqlen_k,
        scale,
        causal,
        window_left,
        window_right,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        lse,
        num_splits,
        workspace,
    )


def _workspace_size(*args):
    return _ops.paged_attention_workspace_size.default(*args)


# torch.compile cannot put an op that returns an int into a graph. What torch.compiler.assume_constant_result does,
# without the import of the whole compiler; operator.index below turns symbolic sizes into guarded numbers.
_workspace_size._dynamo_marked_constant = True


def paged_attention_workspace_size(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_seqs: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_splits: int = 0,
) -> int:
    """Bytes of workspace that `paged_attention` needs with these upper bounds, enough for every backend.

    Under torch.compile this function becomes a constant of the graph (sizes that are symbolic are specialised).
    """
    return _workspace_size(
        operator.index(num_tokens),
        operator.index(num_heads),
        operator.index(num_kv_heads),
        operator.index(head_dim),
        operator.index(num_seqs),
        operator.index(max_seqlen_q),
        operator.index(max_seqlen_k),
        operator.index(num_splits),
    )


def merge_attention_states(
    out: Tensor, lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> None:
    """Merges two partial attention results of the same rows, over disjoint sets of keys, by their lse.

    out, out_a, out_b: `[num_tokens, num_heads, head_dim]`; out_a and out_b in out's dtype or float32.
    lse, lse_a, lse_b: float32 `[num_tokens, num_heads]`, any strides, natural logarithm. An lse of -inf or +inf marks
        an empty part, whose values are not used; two empty parts give 0 and -inf.
    out may be out_a or out_b, lse may be lse_a or lse_b.
    """
    _ops.merge_attention_states.default(out, lse, out_a, lse_a, out_b, lse_b)


def gather_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Copies the pages of sequences into dense tensors, dequantising FP8.

    key, value: `[total, num_kv_heads, head_dim]`, any token and head strides, written: row cu_seqlens[s] + i is token i
        of sequence s. Rows past cu_seqlens[num_seqs] are not written.
    block_table: `[num_seqs, max_blocks]`; seq_lens: `[num_seqs]`; cu_seqlens: `[num_seqs + 1]`, the running sum of it.
    """
    _ops.gather_cache.default(key, value, key_cache, value_cache, block_table, seq_lens, cu_seqlens, k_scale, v_scale)


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    """Copies whole blocks within the caches of every layer (copy on write).

    key_caches, value_caches: one cache a layer, of one block shape and dtype; strides may differ.
    block_mapping: `[pairs, 2]` int64, (source, destination), on the CPU or the caches' device. Destinations are
        distinct and none is a source. A mapping on the CPU is checked, and read before the call returns; one on a
        device costs no sync, and ids out of range are skipped (check mode: they raise).
    """
    _ops.copy_blocks.default(key_caches, value_caches, block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Copies blocks from one cache tensor to another: device to host, host to device, or on one device.

    src, dst: `[num_blocks, ...]` of one block shape and dtype; strides and num_blocks may differ.
    block_mapping: `[pairs, 2]` int64 on the CPU, (block of src, block of dst), destinations distinct. Adjacent pairs
        become one transfer. Transfers run on the current stream.
    """
    _ops.swap_blocks.default(src, dst, block_mapping)
