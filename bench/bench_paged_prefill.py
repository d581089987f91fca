"""What the CUDA prefill kernel does for a call, counted on the virtual GPU.

    python -m bench.bench_paged_prefill

Per case: tensor-core work issued over that of the live (query, key) pairs and over that of whole tiles of 64 rows and
keys; keys and values requested over one reading per query tile; warp instructions per tensor instruction, by class;
shared-memory bank conflicts. Random pages of 16 tokens, causal.
"""

import torch

from bench.shapes import AttentionShape
from pagedkern import vgpu

CASES = [
    ("prefill 512", AttentionShape((512,), (512,), num_heads=8, num_kv_heads=2), torch.bfloat16),
    ("prefill 512, e4m3", AttentionShape((512,), (512,), num_heads=8, num_kv_heads=2), torch.float8_e4m3fn),
    ("chunk 64 of 1024", AttentionShape((64,), (1024,), num_heads=8, num_kv_heads=2), torch.bfloat16),
    (
        "mixed 7 x decode 1024, prefill 256",
        AttentionShape((1,) * 7 + (256,), (1024,) * 7 + (256,), 8, 2),
        torch.bfloat16,
    ),
    ("prefill 256, head_dim 256", AttentionShape((256,), (256,), 12, 2, head_dim=256), torch.bfloat16),
    ("prefill 256, head_dim 64", AttentionShape((256,), (256,), 9, 3, head_dim=64), torch.bfloat16),
]
ROWS = 64


def key_tile(head_dim: int) -> int:
    return 64 if head_dim <= 128 else 32


def tile_work(shape: AttentionShape) -> tuple[int, int]:
    """Flops of whole tiles up to the diagonal, and (query tile, key) pairs, both over all KV heads."""
    group, keys = shape.num_heads // shape.num_kv_heads, key_tile(shape.head_dim)
    flops = pairs = 0
    for q_len, seq_len in zip(shape.query_lens, shape.seq_lens, strict=True):
        for first in range(0, q_len * group, ROWS):
            last = min(first + ROWS, q_len * group) - 1
            seen = seq_len - q_len + last // group + 1
            flops += 4 * ROWS * -(-seen // keys) * keys * shape.head_dim
            pairs += seen
    return flops * shape.num_kv_heads, pairs * shape.num_kv_heads


def run(shape: AttentionShape, dtype: torch.dtype) -> dict:
    ops = getattr(torch.ops, vgpu.load_ops())
    pages = shape.num_pages
    size = (pages, shape.block_size, shape.num_kv_heads, shape.head_dim)
    caches = [torch.randn(size).to(dtype) for _ in range(2)]
    table = torch.zeros(len(shape.seq_lens), max(-(-n // shape.block_size) for n in shape.seq_lens), dtype=torch.int32)
    order = torch.randperm(pages).int()
    used = 0
    for seq, length in enumerate(shape.seq_lens):
        count = -(-length // shape.block_size)
        table[seq, :count] = order[used : used + count]
        used += count
    query = torch.randn(shape.num_tokens, shape.num_heads, shape.head_dim).bfloat16()
    starts = torch.tensor([0, *shape.query_lens]).cumsum(0).int()
    lens = torch.tensor(shape.seq_lens).int()
    with vgpu.session() as session:
        ops.paged_attention(
            torch.empty_like(query), query, *caches, table, lens, starts, max(shape.query_lens), max(shape.seq_lens),
            shape.head_dim**-0.5,
        )  # fmt: skip
    return max(session.reports, key=lambda report: report["tensor_flops"])


def main():
    """Prints a table."""
    print("| case | FLOPs / live | / tiles | K, V bytes / one reading a tile | instructions / mma | conflicts |")
    print("|---|---|---|---|---|---|")
    for name, shape, dtype in CASES:
        report = run(shape, dtype)
        flops, pairs = tile_work(shape)
        other = shape.num_tokens * shape.num_heads * shape.head_dim * 2
        read = (report["global_load_bytes"] - other) / (2 * pairs * shape.head_dim * dtype.itemsize)
        mma = report["tensor_flops"] / (2 * 16 * 8 * 16)
        issued = report["tensor_flops"]
        print(
            f"| {name} | {issued / shape.causal_flops:.3f} | {issued / flops:.3f} | {read:.3f} | "
            f"{report['warp_instructions'] / mma:.2f} | {report['shared_bank_conflicts']:,} of "
            f"{report['shared_load_wavefronts'] + report['shared_store_wavefronts']:,} wavefronts |"
        )
        classes = sorted(report["instructions_by_class"].items(), key=lambda item: -item[1])
        print("  " + ", ".join(f"{k} {v / mma:.2f}" for k, v in classes if v > 0.02 * mma))


if __name__ == "__main__":
    main()
