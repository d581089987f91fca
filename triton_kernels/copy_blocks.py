"""copy_blocks: every pair of every layer, one launch for all caches that share their strides."""

from typing import NamedTuple

import torch
import triton.language as tl

from .common import as_stored, kernel, launch, next_power_of_2, vector_bytes

MAX_CACHES = 256  # of a launch: 8 bytes each out of the 4 KiB that a kernel's parameters may have
TILE_ELEMENTS = 4096


@kernel
def copy_blocks_kernel(
    caches, block_mapping, mapping_stride_pair: tl.int64, mapping_stride_side: tl.int64, num_pairs: tl.int64,
    num_blocks: tl.int64, stride_block: tl.int64, stride_token: tl.int64, stride_head: tl.int64,
    num_tokens: tl.int64, num_heads: tl.int64, row_length: tl.int64,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROW: tl.constexpr,
):  # fmt: skip
    work = tl.program_id(0).to(tl.int64)
    which = work // num_pairs
    pair = work - which * num_pairs
    cache = caches[0].to(tl.int64)
    for i in tl.static_range(1, len(caches)):
        cache = tl.where(which == i, caches[i].to(tl.int64), cache)
    cache = cache.to(caches[0].dtype)
    source = tl.load(block_mapping + pair * mapping_stride_pair)
    target = tl.load(block_mapping + pair * mapping_stride_pair + mapping_stride_side)
    num_rows = num_tokens * num_heads
    if (source >= 0) & (source < num_blocks) & (target >= 0) & (target < num_blocks):
        i_element = tl.arange(0, BLOCK_ROW)
        for first_row in range(0, num_rows, ROWS):
            row = first_row + tl.arange(0, ROWS)
            token = row // num_heads
            o_row = token * stride_token + (row - token * num_heads) * stride_head
            for first in range(0, row_length, BLOCK_ROW):
                mask = (row < num_rows)[:, None] & (first + i_element < row_length)[None, :]
                p_source = cache + (source * stride_block + o_row)[:, None] + (first + i_element)[None, :]
                p_target = cache + (target * stride_block + o_row)[:, None] + (first + i_element)[None, :]
                if VECTOR > 1:
                    p_source, p_target = tl.multiple_of(p_source, (1, VECTOR)), tl.multiple_of(p_target, (1, VECTOR))
                tl.store(p_target, tl.load(p_source, mask=mask), mask=mask)


class Rows(NamedTuple):
    """A block as tokens x heads rows, those made one that are neighbours in memory. Elements."""

    tokens: int
    heads: int
    row: int
    stride_token: int
    stride_head: int


def block_rows(shape: tuple[int, int, int], strides: tuple[int, int]) -> Rows:
    """shape: block_size, num_kv_heads, head_dim; strides of the first two."""
    (tokens, heads, row), (stride_token, stride_head) = shape, strides
    if heads == 1 or stride_head == row:  # NHD: the heads of a token follow each other
        heads, row, stride_head = 1, heads * row, 0
    if tokens == 1 or stride_token == row:  # then the tokens do, of all heads or of one
        tokens, row, stride_token = 1, tokens * row, 0
    if tokens == 1 and heads > 1 and stride_head == row:  # HND: then its heads
        heads, row, stride_head = 1, heads * row, 0
    return Rows(tokens, heads, row, stride_token, stride_head)


def copy_blocks(key_caches, value_caches, block_mapping) -> None:
    num_pairs = block_mapping.size(0)
    if num_pairs == 0 or not key_caches or key_caches[0].numel() == 0:
        return
    caches = [*key_caches, *value_caches]
    num_blocks = min(cache.size(0) for cache in caches)
    if block_mapping.device != caches[0].device:
        block_mapping = _to_device(block_mapping, caches[0].device)
    groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for cache in caches:
        groups.setdefault((*cache.stride()[:3], vector_bytes(cache)), []).append(as_stored(cache))
    for (stride_block, *strides, vector), members in groups.items():
        rows = block_rows(members[0].shape[1:], strides)
        block_row = min(TILE_ELEMENTS, next_power_of_2(rows.row))
        sizes = (vector, TILE_ELEMENTS // block_row, block_row)
        for start in range(0, len(members), MAX_CACHES):
            part = tuple(members[start : start + MAX_CACHES])
            args = (
                part, block_mapping, *block_mapping.stride(), num_pairs, num_blocks, stride_block, rows.stride_token,
                rows.stride_head, rows.tokens, rows.heads, rows.row, *sizes,
            )  # fmt: skip
            launch(copy_blocks_kernel, (len(part) * num_pairs,), args, num_warps=4)


def _to_device(block_mapping: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "copy_blocks: block_mapping must be on the device of the caches while a graph is captured (a replay would "
            f"read the host's memory of then), got {block_mapping.device}"
        )
    return block_mapping.to(device, non_blocking=True)
