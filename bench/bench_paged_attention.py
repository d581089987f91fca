"""Paged attention, held against a plain copy, gathering pages for torch, and vLLM's CPU op in one process.

    python bench/bench_paged_attention.py [part of a shape's name] [cpu or cuda]    a table of medians
    pytest bench/bench_paged_attention.py                             the same calls under pytest-benchmark

GB/s counts every key and value once; the copy's bandwidth counts bytes read and written. Gathering takes each
sequence's pages with index_select and calls scaled_dot_product_attention. vLLM's op is timed where its package can be
imported; it keeps the same keys and values in a layout of its own, written by its own op beforehand.
"""

import sys
from collections.abc import Callable
from types import ModuleType

import torch
from shapes import SHAPES, AttentionShape

import pagedkern  # noqa: F401  (registers torch.ops.pagedkern)
from pagedkern.testing.timing import copy_bandwidth, median_seconds

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


class Inputs:
    """Random queries and a cache whose pages lie in random order."""

    def __init__(self, shape: AttentionShape, cache_dtype: torch.dtype, device: str = "cpu"):
        generator = torch.Generator().manual_seed(0)
        self.shape, self.cache_dtype = shape, cache_dtype
        self.scale = shape.head_dim**-0.5
        cache_shape = (shape.num_pages, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.key_cache, self.value_cache = (
            torch.randn(cache_shape, generator=generator).to(cache_dtype) for _ in range(2)
        )
        order = torch.randperm(shape.num_pages, generator=generator).int()
        counts = [-(-length // shape.block_size) for length in shape.seq_lens]
        self.block_table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, pages in zip(self.block_table, order.split(counts), strict=True):
            row[: len(pages)] = pages
        self.seq_lens = torch.tensor(shape.seq_lens, dtype=torch.int32)
        self.cu_seqlens_q = torch.tensor((0, *shape.query_lens)).cumsum(0).int()
        self.query = torch.randn(shape.num_tokens, shape.num_heads, shape.head_dim, generator=generator).to(BF16)
        self.out = torch.empty_like(self.query)
        for name, value in list(vars(self).items()):
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device))

    def paged(self) -> None:
        shape = self.shape
        torch.ops.pagedkern.paged_attention(
            self.out, self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens, self.cu_seqlens_q,
            max(shape.query_lens), max(shape.seq_lens), self.scale,
        )  # fmt: skip

    def gathered(self) -> None:
        shape = self.shape
        for i, (q_len, seq_len) in enumerate(zip(shape.query_lens, shape.seq_lens, strict=True)):
            pages = self.block_table[i, : -(-seq_len // shape.block_size)]
            keys, values = (
                cache.view(torch.uint8)
                .index_select(0, pages)
                .view(self.cache_dtype)
                .flatten(0, 1)[:seq_len]
                .to(BF16)
                .transpose(0, 1)[None]
                for cache in (self.key_cache, self.value_cache)
            )
            rows = slice(int(self.cu_seqlens_q[i]), int(self.cu_seqlens_q[i + 1]))
            mask = None
            if q_len > 1:
                mask = torch.ones(q_len, seq_len, dtype=torch.bool, device=pages.device).tril(seq_len - q_len)
            self.out[rows] = torch.nn.functional.scaled_dot_product_attention(
                self.query[rows].transpose(0, 1)[None], keys, values, mask, scale=self.scale, enable_gqa=True
            )[0].transpose(0, 1)


def import_vllm_ops() -> ModuleType | None:
    try:
        import vllm._custom_ops as vllm_ops
        from vllm.platforms import current_platform

        current_platform.import_kernels()
    except ImportError:
        return None
    return vllm_ops


def vllm_call(vllm_ops: ModuleType, inputs: Inputs) -> Callable[[], None]:
    """vLLM's op over the same keys and values. bf16 caches only: its FP8 path has another scale contract."""
    shape = inputs.shape
    isa = "vec" if shape.block_size % 32 == 0 else "vec16"
    cache = torch.empty(shape.num_pages, shape.num_kv_heads, 2 * shape.block_size, shape.head_dim, dtype=BF16)
    key_cache, value_cache = cache.chunk(2, dim=2)
    vllm_ops.cpu_attn_reshape_and_cache(
        inputs.key_cache.flatten(0, 1), inputs.value_cache.flatten(0, 1), key_cache, value_cache,
        torch.arange(shape.num_pages * shape.block_size), isa,
    )  # fmt: skip
    out = torch.empty_like(inputs.out)

    def call() -> None:
        metadata = vllm_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(shape.seq_lens), num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, seq_lens=inputs.seq_lens, dtype=BF16, query_start_loc=inputs.cu_seqlens_q,
            causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=True,
        )  # fmt: skip
        vllm_ops.cpu_attention_with_kv_cache(
            query=inputs.query, key_cache=key_cache, value_cache=value_cache, output=out,
            query_start_loc=inputs.cu_seqlens_q, seq_lens=inputs.seq_lens, scale=inputs.scale, causal=True,
            alibi_slopes=None, sliding_window=-1, block_table=inputs.block_table, softcap=0.0,
            scheduler_metadata=metadata, s_aux=None,
        )  # fmt: skip

    call()
    inputs.paged()
    torch.testing.assert_close(out, inputs.out, atol=2e-2, rtol=2e-2)
    return call


def print_row(name: str, inputs: Inputs, vllm_ops: ModuleType | None, copy: float) -> None:
    shape, dtype = inputs.shape, inputs.cache_dtype
    device = inputs.query.device.type
    paged = median_seconds(inputs.paged, device=device)
    gathered = median_seconds(inputs.gathered, repeats=5, warmup=1, device=device)
    other = "-"
    if vllm_ops is not None and dtype == BF16:
        other = f"{median_seconds(vllm_call(vllm_ops, inputs)) / paged:.2f}x"
    bandwidth = shape.kv_bytes(dtype.itemsize) / paged
    print(
        f"| {name} | {str(dtype).split('.')[1]} | {paged * 1e3:.3f} | {bandwidth / 1e9:.2f} | {bandwidth / copy:.0%} "
        f"| {2 * bandwidth / copy:.0%} | {shape.causal_flops / paged / 1e9:.0f} | {gathered / paged:.1f}x | {other} |",
        flush=True,
    )


def main(wanted: str = "", device: str = "cpu") -> None:
    vllm_ops = import_vllm_ops() if device == "cpu" else None
    copy_bytes = 1 << (28 if device == "cpu" else 30)
    copy = copy_bandwidth(copy_bytes, device)
    where = f"{torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {where}, plain copy {copy / 1e9:.1f} GB/s")
    print("| shape | cache | ms | KV GB/s | of copy | of bytes copied | GFLOP/s | over gather + SDPA | over vLLM |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        if wanted in name:
            for dtype in (BF16, E4M3, E5M2):
                print_row(name, Inputs(shape, dtype, device), vllm_ops, copy)
    print(f"plain copy afterwards {copy_bandwidth(copy_bytes, device) / 1e9:.1f} GB/s")


# A hook in place of pytest's decorators: the table also runs where pytest is not installed.
def pytest_generate_tests(metafunc) -> None:
    metafunc.parametrize("dtype", [BF16, E4M3, E5M2], ids=str)
    metafunc.parametrize("name", SHAPES)


def test_bench_paged_attention(benchmark, name: str, dtype: torch.dtype) -> None:
    inputs = Inputs(SHAPES[name], dtype)
    benchmark(inputs.paged)
    paged = inputs.out.clone()
    inputs.gathered()
    torch.testing.assert_close(paged, inputs.out, atol=2e-2, rtol=2e-2)


if __name__ == "__main__":
    main(*sys.argv[1:3])
