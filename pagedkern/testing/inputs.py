"""Turns an attention case into tensors: live keys random, everything else poisoned."""

from dataclasses import dataclass

import torch

from pagedkern import reference
from pagedkern.testing import layouts, poison
from pagedkern.testing.cases import AttentionCase
from pagedkern.testing.poison import Buffer, allocate


@dataclass
class AttentionInputs:
    case: AttentionCase
    query: Buffer
    out: Buffer
    lse: Buffer | None
    cache: layouts.CachePair
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    workspace: Buffer | None = None

    def options(self) -> dict:
        case = self.case
        return dict(
            scale=case.softmax_scale, causal=case.causal, window_left=case.window[0], window_right=case.window[1],
            softcap=case.softcap, alibi_slopes=self.alibi_slopes, sinks=self.sinks, k_scale=self.k_scale,
            v_scale=self.v_scale,
        )  # fmt: skip

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.paged_attention(
            self.query.view, self.cache.key, self.cache.value, self.block_table, self.seq_lens, self.cu_seqlens_q,
            **self.options(),
        )  # fmt: skip

    def call(self, op, num_splits: int | None = None) -> None:
        case, options = self.case, self.options()
        op(
            self.out.view, self.query.view, self.cache.key, self.cache.value, self.block_table, self.seq_lens,
            self.cu_seqlens_q, max(case.query_lens, default=0) + case.bound_slack,
            max(case.seq_lens, default=0) + case.bound_slack, options.pop("scale"), **options,
            lse=self.lse.view if self.lse else None,
            num_splits=case.num_splits if num_splits is None else num_splits,
            workspace=self.workspace.view if self.workspace else None,
        )  # fmt: skip


def live_keys(case: AttentionCase) -> list[range]:
    """Per sequence, the key positions that at least one of its query rows sees (a stretch)."""
    result = []
    for q_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True):
        ranges = [reference.live_range(seq_len - q_len + i, seq_len, case.causal, *case.window) for i in range(q_len)]
        ranges = [r for r in ranges if r[0] < r[1]]
        result.append(range(min(r[0] for r in ranges), max(r[1] for r in ranges)) if ranges else range(0))
    return result


def scale_tensor(kind: str | None, cache_shape, generator, device, low=0.02, high=0.1) -> torch.Tensor | None:
    """A scale of the named kind, random within [low, high]; NaN in the gaps of a strided one."""
    num_blocks, block_size, num_kv_heads, _ = cache_shape
    shape = {
        None: None, "tensor": (1,), "scalar": (), "head": (num_kv_heads,),
        "token": (num_blocks, block_size, num_kv_heads), "token_strided": (num_blocks, block_size, num_kv_heads),
    }[kind]  # fmt: skip
    if shape is None:
        return None
    values = torch.rand(shape, generator=generator) * (high - low) + low
    if kind == "token_strided":
        strides = (2 * block_size * num_kv_heads + 1, 2, 2 * block_size)
        view = allocate(shape, strides, 1, torch.float32, "nan", device).view
        view.copy_(values)
        return view
    return values.to(device)


def store_rows(cache, scale, blocks: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
    """Puts rows [n, num_kv_heads, head_dim] float32 into n slots."""
    if cache.dtype.itemsize == 1:
        quotient = rows / reference.cache.scale_at(scale, blocks, offsets).unsqueeze(-1)
        cache.view(torch.uint8)[blocks, offsets] = reference.encode(quotient, cache.dtype).view(torch.uint8)
    else:
        cache[blocks, offsets] = rows.to(cache.dtype)


def build_attention(case: AttentionCase, seed: int = 0, device: str = "cpu") -> AttentionInputs:
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = case.heads
    live = live_keys(case)
    table, num_blocks, spare = _block_table(case, generator)
    shape = (num_blocks, case.block_size, kv_heads, case.head_dim)
    cache = layouts.cache_pair(case.cache_layout, shape, case.stored_dtype, "nan")
    k_scale = scale_tensor(case.k_scale, shape, generator, "cpu")
    v_scale = scale_tensor(case.v_scale, shape, generator, "cpu")
    written = torch.zeros(num_blocks, case.block_size, dtype=torch.bool)
    for seq, keys in enumerate(live):
        position = torch.arange(keys.start, keys.stop)
        blocks, offsets = table[seq].long()[position // case.block_size], position % case.block_size
        fresh = ~written[blocks, offsets]
        written[blocks, offsets] = True
        for tensor, scale in ((cache.key, k_scale), (cache.value, v_scale)):
            rows = torch.randn(len(keys), kv_heads, case.head_dim, generator=generator)
            store_rows(tensor, scale, blocks[fresh], offsets[fresh], rows[fresh])
    for scale in (k_scale, v_scale):
        if scale is not None and scale.dim() == 3:
            scale[~written] = float("nan")
    poison.poison_block_table(table, _used(case, live), [*poison.BAD_BLOCKS, spare, num_blocks])

    rows = (case.num_tokens, heads, case.head_dim)
    query = layouts.rows(case.query_layout, rows, case.dtype, "nan")
    live_rows = sum(case.query_lens)
    _fill_rows(query.view[:live_rows], generator)
    out = layouts.rows(case.out_layout, rows, case.dtype, "sentinel")
    lse = layouts.row_heads(case.lse_layout, rows[:2], torch.float32, "sentinel") if case.lse_layout else None
    starts = torch.tensor([0, *case.query_lens]).cumsum(0).int()
    inputs = AttentionInputs(
        case, query, out, lse, cache, table, torch.tensor(case.seq_lens, dtype=torch.int32),
        None if case.q_lens is None else starts,
        torch.rand(heads, generator=generator) * 0.5 if case.alibi else None,
        torch.randn(heads, generator=generator) * 2 if case.sinks else None,
        k_scale, v_scale,
    )  # fmt: skip
    return inputs if device == "cpu" else move(inputs, device)


def _block_table(case: AttentionCase, generator) -> tuple[torch.Tensor, int, int]:
    """Blocks in random order; a table wider than any sequence needs, its rows apart; one spare block of NaN."""
    counts = [-(-length // case.block_size) for length in case.seq_lens]
    width = max(counts, default=0) + case.table_slack
    shared = min([case.shared_blocks, *counts]) if counts else 0
    num_blocks = shared + sum(count - shared for count in counts) + 3
    order = torch.randperm(num_blocks, generator=generator).int()
    stride = width + case.table_stride_slack
    table = torch.full((max(len(counts), 1) * max(stride, 1),), poison.HUGE_BLOCK, dtype=torch.int32)
    table = table.as_strided((len(counts), width), (stride, 1))
    used = shared
    for seq, count in enumerate(counts):
        table[seq, :shared] = order[:shared]
        table[seq, shared:count] = order[used : used + count - shared]
        used += count - shared
    return table, num_blocks, int(order[-1])


def _used(case: AttentionCase, live: list[range]) -> list[range]:
    """Per sequence, the columns of the block table that hold a live key."""
    return [range(k.start // case.block_size, (k.stop - 1) // case.block_size + 1) if k else range(0) for k in live]


def _fill_rows(view: torch.Tensor, generator) -> None:
    """Random rows, also where rows share memory (stride 0)."""
    if view.numel() == 0:
        return
    for token in range(view.size(0) if view.stride(0) else 1):
        for head in range(view.size(1) if view.stride(1) else 1):
            view[token, head] = torch.randn(view.size(2), generator=generator).to(view.dtype)


def move(inputs: AttentionInputs, device: str) -> AttentionInputs:
    """The same layouts on another device."""

    def moved(buffer: Buffer | None) -> Buffer | None:
        if buffer is None:
            return None
        base = buffer.bytes().to(device).view(buffer.base.dtype)
        view = buffer.view
        return Buffer(base, poison.restride(base, view.shape, view.stride(), view.storage_offset()))

    def tensor(value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None:
            return None
        whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(device)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())

    buffers = [moved(buffer) for buffer in inputs.cache.buffers]
    key, value = (
        poison.restride(buffer.base, old.shape, old.stride(), old.storage_offset())
        for buffer, old in ((buffers[0], inputs.cache.key), (buffers[-1], inputs.cache.value))
    )
    return AttentionInputs(
        inputs.case, moved(inputs.query), moved(inputs.out), moved(inputs.lse), layouts.CachePair(buffers, key, value),
        tensor(inputs.block_table), tensor(inputs.seq_lens), tensor(inputs.cu_seqlens_q), tensor(inputs.alibi_slopes),
        tensor(inputs.sinks), tensor(inputs.k_scale), tensor(inputs.v_scale), moved(inputs.workspace),
    )  # fmt: skip
