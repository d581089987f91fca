"""Cache writes, block copies, gathers and merges, held against a plain copy in the same run.

    python bench/bench_cache_ops.py                    a table: time, GB/s, share of the copy bandwidth
    python bench/bench_cache_ops.py --device cuda      the same on a GPU
    pytest bench/bench_cache_ops.py                    the same calls under pytest-benchmark

GB/s counts the bytes an op must move (reads and writes of rows; not tables, slots and scales). Caches are four times
the size of what a call touches, pages in random order. "small" calls are the decode step's: time is all that matters.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import pagedkern  # noqa: F401  (registers torch.ops.pagedkern)
from pagedkern.testing.timing import copy_bandwidth, median_seconds

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LARGE, SMALL = {"cpu": 8192, "cuda": 32768}, (1, 16)
ops = torch.ops.pagedkern


@dataclass
class Bench:
    name: str
    num_bytes: int
    call: Callable[[], None]


def ones(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32).to(dtype)


class Inputs:
    """One layer of a model with 32 query and 8 KV heads: a fused qkv, caches of both dtypes, random pages."""

    def __init__(self, num_tokens: int, device: str = "cpu"):
        self.num_tokens = num_tokens
        with torch.device(device):
            self.make(num_tokens)

    def make(self, num_tokens: int):
        num_pages = -(-num_tokens // BLOCK_SIZE)
        num_blocks = max(4 * num_pages, 64)
        qkv = ones(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=BF16)
        self.query, self.key, self.value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        self.nhd = [ones(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=BF16) for _ in range(2)]
        self.hnd = [ones(num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=BF16).transpose(1, 2) for _ in range(2)]
        self.fp8 = [ones(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=E4M3) for _ in range(2)]
        self.pages = torch.randperm(num_blocks)[:num_pages]
        self.slots = (self.pages[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:num_tokens]
        self.scales = [torch.tensor([0.37])] * 2
        self.token_scales = [torch.ones(num_blocks, BLOCK_SIZE, KV_HEADS) for _ in range(2)]
        # cos 1 and sin 0: the rotation in place leaves the inputs as they are, call after call.
        half = torch.ones(num_tokens, HEAD_DIM // 2)
        self.table, self.positions = torch.cat([half, torch.zeros_like(half)], 1), torch.arange(num_tokens)

    def row_bytes(self, heads: int, bytes_per_element: int) -> int:
        return self.num_tokens * heads * HEAD_DIM * bytes_per_element


def write_benches(inputs: Inputs) -> list[Bench]:
    kv, slots = (inputs.key, inputs.value), inputs.slots
    label = f"{inputs.num_tokens} tokens"
    rope = (inputs.positions, inputs.table, slots)
    bf16, fp8, rotated = (
        inputs.row_bytes(2 * KV_HEADS, 4),
        inputs.row_bytes(2 * KV_HEADS, 3),
        inputs.row_bytes(HEADS + KV_HEADS, 4),
    )
    return [
        Bench(f"write bf16, {label}", bf16, lambda: ops.reshape_and_cache(*kv, *inputs.nhd, slots)),
        Bench(f"write bf16 HND, {label}", bf16, lambda: ops.reshape_and_cache(*kv, *inputs.hnd, slots)),
        Bench(f"write e4m3, {label}", fp8, lambda: ops.reshape_and_cache(*kv, *inputs.fp8, slots)),
        Bench(
            f"write e4m3 scale .37, {label}",
            fp8,
            lambda: ops.reshape_and_cache(*kv, *inputs.fp8, slots, *inputs.scales),
        ),
        Bench(
            f"write e4m3 dynamic, {label}",
            fp8,
            lambda: ops.reshape_and_cache_dynamic(*kv, *inputs.fp8, *inputs.token_scales, slots),
        ),
        Bench(
            f"rope and write bf16, {label}",
            rotated + inputs.row_bytes(KV_HEADS, 2 + 4),
            lambda: ops.rope_reshape_and_cache(inputs.query, *kv, *inputs.nhd, *rope),
        ),
        Bench(
            f"rope and write e4m3, {label}",
            rotated + inputs.row_bytes(KV_HEADS, 1 + 3),
            lambda: ops.rope_reshape_and_cache(inputs.query, *kv, *inputs.fp8, *rope, False, *inputs.scales),
        ),
    ]


def read_benches(inputs: Inputs) -> list[Bench]:
    num_seqs = 8
    table = inputs.pages.int().reshape(num_seqs, -1).contiguous()
    with torch.device(table.device):
        lens = torch.full((num_seqs,), inputs.num_tokens // num_seqs, dtype=torch.int32)
        cu_seqlens = torch.arange(num_seqs + 1, dtype=torch.int32) * lens[0]
        outs = [ones(inputs.num_tokens, KV_HEADS, HEAD_DIM, dtype=BF16) for _ in range(2)]
    where = (table, lens, cu_seqlens)
    return [
        Bench("gather bf16", inputs.row_bytes(2 * KV_HEADS, 4), lambda: ops.gather_cache(*outs, *inputs.nhd, *where)),
        Bench(
            "gather bf16 HND", inputs.row_bytes(2 * KV_HEADS, 4), lambda: ops.gather_cache(*outs, *inputs.hnd, *where)
        ),
        Bench(
            "gather e4m3 scale .37",
            inputs.row_bytes(2 * KV_HEADS, 3),
            lambda: ops.gather_cache(*outs, *inputs.fp8, *where, *inputs.scales),
        ),
    ]


def block_benches(inputs: Inputs) -> list[Bench]:
    ids = torch.randperm(inputs.nhd[0].size(0), device=inputs.pages.device)
    pairs = ids.reshape(2, -1).t()[: len(inputs.pages)].contiguous()
    key_caches, value_caches = zip(inputs.nhd, inputs.hnd, strict=True)

    def copy(name: str, layers: slice, mapping: torch.Tensor) -> Bench:
        keys, values = list(key_caches[layers]), list(value_caches[layers])
        block_bytes = BLOCK_SIZE * KV_HEADS * HEAD_DIM * 2
        moved = 2 * 2 * len(keys) * len(mapping) * block_bytes
        return Bench(name, moved, lambda: ops.copy_blocks(keys, values, mapping))

    return [
        copy(f"copy_blocks, {len(pairs)} pairs", slice(0, 1), pairs),
        copy(f"copy_blocks HND, {len(pairs)} pairs", slice(1, 2), pairs),
        copy(f"copy_blocks 2 layers, {len(pairs)} pairs", slice(0, 2), pairs),
        copy("copy_blocks, 1 pair", slice(0, 1), pairs[:1]),
    ]


def merge_benches(num_tokens: int, device: str = "cpu") -> list[Bench]:
    with torch.device(device):
        out, a, b = (ones(num_tokens, HEADS, HEAD_DIM, dtype=BF16) for _ in range(3))
        lse, lse_a, lse_b = (ones(num_tokens, HEADS, dtype=torch.float32) for _ in range(3))
    call = lambda: ops.merge_attention_states(out, lse, a, lse_a, b, lse_b)  # noqa: E731
    return [Bench(f"merge bf16, {num_tokens} tokens", 3 * out.numel() * 2, call)]


def large_benches(device: str = "cpu") -> list[Bench]:
    tokens = LARGE[device]
    inputs = Inputs(tokens, device)
    return [*write_benches(inputs), *read_benches(inputs), *block_benches(inputs), *merge_benches(tokens, device)]


def small_benches(device: str = "cpu") -> list[Bench]:
    return [bench for n in SMALL for bench in [*write_benches(Inputs(n, device)), *merge_benches(n, device)]]


def pytest_generate_tests(metafunc):
    if "bench" in metafunc.fixturenames:
        metafunc.parametrize("bench", [*large_benches(), *small_benches()], ids=lambda bench: bench.name)


@pytest.mark.benchmark(group="cache ops")
def test_bench(benchmark, bench):
    benchmark(bench.call)


def describe(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU {pagedkern.build_info()['cpu_simd']}, {torch.get_num_threads()} threads"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=LARGE, default="cpu")
    device = parser.parse_args().device
    bandwidth = copy_bandwidth(1 << (30 if device == "cuda" else 28), device)
    print(describe(device))
    print(f"plain copy: {bandwidth / 1e9:.1f} GB/s, reads and writes counted\n")
    print(f"{'op':38}{'us':>10}{'GB/s':>8}{'of copy':>9}")
    for bench in large_benches(device):
        seconds = median_seconds(bench.call, repeats=30, device=device)
        rate = bench.num_bytes / seconds
        print(f"{bench.name:38}{seconds * 1e6:10.1f}{rate / 1e9:8.1f}{rate / bandwidth:9.0%}")
    print(f"\n{'small calls, dispatch included':38}{'us':>10}")
    for bench in small_benches(device):
        print(f"{bench.name:38}{median_seconds(bench.call, repeats=2000, warmup=50, device=device) * 1e6:10.2f}")


if __name__ == "__main__":
    main()
