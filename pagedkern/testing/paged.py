"""Small batches given as plain keys and values, for tests that know the answer by hand."""

from dataclasses import dataclass

import torch

from pagedkern import reference
from pagedkern.testing.backends import Backend
from pagedkern.testing.inputs import store_rows
from pagedkern.testing.poison import BAD_BLOCKS, poison_block_table


@dataclass
class PagedBatch:
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def attend(
        self, backend: Backend | None, query: torch.Tensor, q_lens: list[int] | None = None, scale: float = 1.0,
        num_splits: int = 0, **options,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """out and lse of the backend, or float64 ones of the reference (None)."""
        starts = None if q_lens is None else torch.tensor([0, *q_lens]).cumsum(0).int()
        options |= {"k_scale": self.k_scale, "v_scale": self.v_scale}
        inputs = (query, self.key_cache, self.value_cache, self.block_table, self.seq_lens, starts)
        if backend is None:
            return reference.paged_attention(*inputs, scale=scale, **options)
        out = torch.full(query.shape, float("nan"), dtype=query.dtype)
        lse = torch.full(query.shape[:2], float("nan"))
        longest = max(q_lens or [1]), int(self.seq_lens.max())
        backend.op("paged_attention")(out, *inputs, *longest, scale, **options, lse=lse, num_splits=num_splits)
        return out, lse


def page(
    keys: list[torch.Tensor], values: list[torch.Tensor], block_size: int = 16, dtype: torch.dtype = torch.float32,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, table_slack: int = 2, seed: int = 0,
) -> PagedBatch:  # fmt: skip
    """Spreads each sequence's keys and values [n, num_kv_heads, head_dim] over pages in random order; NaN elsewhere."""
    counts = [-(-len(rows) // block_size) for rows in keys]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    shape = (num_blocks, block_size, *keys[0].shape[1:])
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    caches = [torch.full((nbytes,), 0xFF, dtype=torch.uint8).view(dtype).view(shape) for _ in range(2)]
    table = torch.full((len(keys), max(counts) + table_slack), -1, dtype=torch.int32)
    for seq, count in enumerate(counts):
        table[seq, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        position = torch.arange(len(keys[seq]))
        blocks, offsets = table[seq].long()[position // block_size], position % block_size
        store_rows(caches[0], k_scale, blocks, offsets, keys[seq].float())
        store_rows(caches[1], v_scale, blocks, offsets, values[seq].float())
    poison_block_table(table, [range(count) for count in counts], [*BAD_BLOCKS, order[-1], num_blocks])
    seq_lens = torch.tensor([len(rows) for rows in keys], dtype=torch.int32)
    return PagedBatch(*caches, table, seq_lens, k_scale, v_scale)


def positions_as_values(seq_len: int, kv_heads: int = 1, head_dim: int = 64, modulus: int = 128) -> torch.Tensor:
    """V[j] = j % modulus, exact in bf16: with K = 0 the output is the mean over the live positions."""
    return (torch.arange(seq_len) % modulus).float()[:, None, None].expand(seq_len, kv_heads, head_dim)


def zero_keys(seq_len: int, kv_heads: int = 1, head_dim: int = 64) -> torch.Tensor:
    return torch.zeros(seq_len, kv_heads, head_dim)
