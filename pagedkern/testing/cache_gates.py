"""The cache ops' traffic on the virtual GPU against what must move: tests hold it to the gates, a bench prints it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagedkern import vgpu

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS, HEAD_DIM, BLOCK_SIZE = 32, 128, 16
SECTOR = 32  # bytes of memory that always move together


@dataclass(frozen=True)
class Call:
    """One call on 16-byte aligned tensors, and the bytes it must read and write: rows, scales, tables and slots."""

    name: str
    run: Callable[[], None]
    must_read: int
    must_write: int
    rows: int  # bytes that lanes ask for 16 at a time: all of key, value and query, and rope's angles


@dataclass(frozen=True)
class Traffic:
    """Ratios of what was moved to what must be; 1 is ideal."""

    call: Call
    memory: float  # distinct sectors, read and written: what reaches memory at the least
    requested: float  # sectors of all requests: what passes the first-level caches
    vectors: float  # bytes moved by accesses of 16 bytes, over rows: 1 is all of them and each once
    lanes: float  # lanes at work in such a request, of 32
    conflicts: int  # wavefronts of shared memory beyond the fewest
    launches: int

    def row(self) -> str:
        return (
            f"| {self.call.name} | {(self.call.must_read + self.call.must_write) / 1e6:.2f} | {self.memory:.4f} "
            f"| {self.requested:.4f} | {self.vectors:.4f} | {self.lanes:.2f} | {self.conflicts} |"
        )


HEADING = (
    "| call | MB that must move | distinct sectors | sectors requested | rows by 16 bytes | lanes at work "
    "| bank conflicts |"
)


def measure(call: Call) -> Traffic:
    with vgpu.session() as session:
        call.run()
    total = {
        key: sum(report[key] for report in session.reports)
        for key in (
            "unique_global_read_bytes", "unique_global_write_bytes", "global_load_sectors", "global_store_sectors",
            "global_vector_bytes", "global_vector_requests", "shared_bank_conflicts",
        )
    }  # fmt: skip
    must = call.must_read + call.must_write
    return Traffic(
        call,
        memory=(total["unique_global_read_bytes"] + total["unique_global_write_bytes"]) / must,
        requested=SECTOR * (total["global_load_sectors"] + total["global_store_sectors"]) / must,
        vectors=total["global_vector_bytes"] / call.rows,
        lanes=total["global_vector_bytes"] / (16 * total["global_vector_requests"]),
        conflicts=total["shared_bank_conflicts"],
        launches=len(session.reports),
    )


def _rows(tokens: int, heads: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return _aligned(torch.ones(tokens, heads, HEAD_DIM, dtype=dtype))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """torch's allocations begin on 64 bytes, so that no sector is shared."""
    assert tensor.data_ptr() % SECTOR == 0
    return tensor


class _Inputs:
    def __init__(self, tokens: int, kv_heads: int):
        self.tokens, self.kv_heads = tokens, kv_heads
        pages = -(-tokens // BLOCK_SIZE)
        self.num_blocks = pages + 4
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(0))
        self.table = order[:pages].int()[None]
        self.slots = (order[:pages, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:tokens].contiguous()
        self.key, self.value = (_rows(tokens, kv_heads) for _ in range(2))
        self.query = _rows(tokens, HEADS)
        self.row_bytes = 2 * tokens * kv_heads * HEAD_DIM  # key or value in 16 bits

    def caches(self, dtype: torch.dtype = BF16, layout: str = "NHD") -> list[torch.Tensor]:
        shape = (self.num_blocks, BLOCK_SIZE, self.kv_heads, HEAD_DIM)
        if layout == "HND":
            shape = (self.num_blocks, self.kv_heads, BLOCK_SIZE, HEAD_DIM)
        pair = [_aligned(torch.zeros(shape, dtype=torch.float32).to(dtype)) for _ in range(2)]
        return [cache.transpose(1, 2) for cache in pair] if layout == "HND" else pair


def write_calls(tokens: int, kv_heads: int = 8) -> list[Call]:
    ops, x = getattr(torch.ops, vgpu.load_ops()), _Inputs(tokens, kv_heads)
    nhd, hnd, fp8 = x.caches(), x.caches(layout="HND"), x.caches(E4M3)
    slot_bytes, rows = 8 * tokens, 2 * x.row_bytes
    label = f"{tokens} tokens, {kv_heads} KV heads"
    scale = [torch.tensor([0.37])] * 2
    token_scales = [torch.ones(x.num_blocks, BLOCK_SIZE, kv_heads) for _ in range(2)]
    scale_bytes = 2 * 4 * tokens * kv_heads
    angles = torch.ones(tokens, HEAD_DIM)
    positions = torch.arange(tokens)
    rope_bytes = 2 * tokens * HEADS * HEAD_DIM + x.row_bytes  # query and key, read and written
    rope = (positions, angles, x.slots)
    rope_reads = rope_bytes + rows // 2 + slot_bytes + 4 * tokens * HEAD_DIM + 8 * tokens
    angles_of_lanes = 4 * 4 * tokens * HEAD_DIM  # the lanes of four heads ask for the same ones
    return [
        Call(f"write bf16 NHD, {label}", lambda: ops.reshape_and_cache(x.key, x.value, *nhd, x.slots),
             rows + slot_bytes, rows, 2 * rows),
        Call(f"write bf16 HND, {label}",
             lambda: ops.reshape_and_cache(x.key, x.value, *hnd, x.slots),
             rows + slot_bytes, rows, 2 * rows),
        Call(f"write e4m3, {label}", lambda: ops.reshape_and_cache(x.key, x.value, *fp8, x.slots, *scale),
             rows + slot_bytes, rows // 2, rows + rows // 2),
        Call(f"write e4m3 dynamic, {label}",
             lambda: ops.reshape_and_cache_dynamic(x.key, x.value, *fp8, *token_scales, x.slots),
             rows + slot_bytes, rows // 2 + scale_bytes, rows + rows // 2),
        Call(f"rope and write bf16, {label}",
             lambda: ops.rope_reshape_and_cache(x.query, x.key, x.value, *nhd, *rope),
             rope_reads, rope_bytes + rows, 2 * rope_bytes + rows // 2 + rows + angles_of_lanes),
        Call(f"rope and write e4m3, {label}",
             lambda: ops.rope_reshape_and_cache(x.query, x.key, x.value, *fp8, *rope, False, *scale),
             rope_reads, rope_bytes + rows // 2, 2 * rope_bytes + rows + angles_of_lanes),
    ]  # fmt: skip


def read_calls(tokens: int, kv_heads: int = 8) -> list[Call]:
    ops, x = getattr(torch.ops, vgpu.load_ops()), _Inputs(tokens, kv_heads)
    nhd, fp8 = x.caches(), x.caches(E4M3)
    rows, lens = 2 * x.row_bytes, torch.tensor([tokens], dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    scale = [torch.tensor([0.37])] * 2
    table_bytes = 4 * x.table.numel()
    where = (x.table, lens, starts)
    parts = [_rows(tokens, HEADS) for _ in range(2)]
    lse = [torch.zeros(tokens, HEADS) for _ in range(2)]
    out, out_lse = _rows(tokens, HEADS), torch.zeros(tokens, HEADS)
    part_bytes, lse_bytes = 2 * out.numel(), 4 * tokens * HEADS
    label = f"{tokens} tokens"
    return [
        Call(f"gather bf16, {label}", lambda: ops.gather_cache(x.key, x.value, *nhd, *where),
             rows + table_bytes, rows, 2 * rows),
        Call(f"gather e4m3, {label}", lambda: ops.gather_cache(x.key, x.value, *fp8, *where, *scale),
             rows // 2 + table_bytes, rows, rows // 2 + rows),
        Call(f"merge bf16, {label}",
             lambda: ops.merge_attention_states(out, out_lse, parts[0], lse[0], parts[1], lse[1]),
             2 * part_bytes + 2 * lse_bytes, part_bytes + lse_bytes, 3 * part_bytes),
    ]  # fmt: skip


def copy_calls(pairs: int, layers: int, kv_heads: int = 8) -> list[Call]:
    ops, x = getattr(torch.ops, vgpu.load_ops()), _Inputs(2 * pairs * BLOCK_SIZE, kv_heads)
    caches = [x.caches() for _ in range(layers)]
    ids = torch.randperm(2 * pairs, generator=torch.Generator().manual_seed(1))
    mapping = torch.stack([ids[:pairs], ids[pairs:]], 1).contiguous()
    moved = pairs * layers * 2 * BLOCK_SIZE * kv_heads * HEAD_DIM * 2
    keys, values = [c[0] for c in caches], [c[1] for c in caches]
    name = f"copy_blocks, {pairs} pairs, {layers} layers"
    return [Call(name, lambda: ops.copy_blocks(keys, values, mapping), moved + 16 * pairs, moved, 2 * moved)]
