"""Finds the configs of the Triton attention kernel on the GPU at hand and prints the table for attention_plan.py.

python -m bench.tune_triton
"""

import itertools
import statistics

import torch

from bench.shapes import AttentionShape
from pagedkern.triton_kernels import attention_plan, common, paged_attention
from pagedkern.triton_kernels.attention_plan import Config

# What a config must be good at: decode of long and short contexts, a verify step, a prefill, a mixed batch.
SHAPES = (
    AttentionShape((1,) * 64, (4096,) * 64),
    AttentionShape((1,) * 8, (65536,) * 8),
    AttentionShape((1,), (1024,)),
    AttentionShape((4,) * 16, (8192,) * 16),
    AttentionShape((4096,), (4096,)),
    AttentionShape((1,) * 31 + (1024,), (4096,) * 32),
)
DTYPES = {2: torch.bfloat16, 1: torch.float8_e4m3fn}


def candidates(head_dim: int, itemsize: int, shared_limit: int) -> list[Config]:
    every = (Config(*c) for c in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4)) if c[1] <= c[0])
    return [c for c in every if attention_plan.shared_bytes(c, head_dim, itemsize) <= shared_limit]


def fastest(times: list[dict[Config, float]]) -> Config:
    """times: one dict for each shape. The config with the least geometric mean relative to the best of each shape."""
    best = [min(of_shape.values()) for of_shape in times]
    common_configs = set.intersection(*(set(of_shape) for of_shape in times))

    def score(config: Config) -> tuple[float, Config]:
        return statistics.geometric_mean(t[config] / b for t, b in zip(times, best, strict=True)), config

    return min(common_configs, key=score)


def as_table(chosen: dict[tuple[int, int], Config]) -> str:
    return "\n".join(f"    {key}: Config{tuple(config)}," for key, config in sorted(chosen.items()))


def inputs(shape: AttentionShape, head_dim: int, itemsize: int, device: str) -> tuple:
    pages, size = shape.num_pages, shape.block_size
    cache = torch.randn(pages, size, shape.num_kv_heads, head_dim, device=device).to(DTYPES[itemsize])
    order = torch.randperm(pages, device=device).int()
    width = max(-(-n // size) for n in shape.seq_lens)
    table = torch.zeros(len(shape.seq_lens), width, dtype=torch.int32, device=device)
    used = 0
    for seq, length in enumerate(shape.seq_lens):
        count = -(-length // size)
        table[seq, :count] = order[used : used + count]
        used += count
    query = torch.randn(shape.num_tokens, shape.num_heads, head_dim, device=device, dtype=torch.bfloat16)
    seq_lens = torch.tensor(shape.seq_lens, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *shape.query_lens], device=device).cumsum(0).int()
    bounds = (max(shape.query_lens), max(shape.seq_lens), head_dim**-0.5)
    return torch.empty_like(query), query, cache, cache.clone(), table, seq_lens, starts, *bounds


def measure(config: Config, args: tuple, itemsize: int) -> float:
    """Milliseconds, median; infinite where the config does not compile on this device."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    key = common.padded_head_dim(args[1].size(2)), itemsize
    former, attention_plan.CONFIGS[key] = attention_plan.CONFIGS[key], config
    paged_attention._config.cache_clear()
    try:
        return do_bench(lambda: torch.ops.pagedkern_triton.paged_attention(*args), return_mode="median")
    except OutOfResources:
        return float("inf")
    finally:
        attention_plan.CONFIGS[key] = former
        paged_attention._config.cache_clear()


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("tune_triton needs a GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    chosen = {}
    for head_dim, itemsize in attention_plan.CONFIGS:
        options = candidates(head_dim, itemsize, common.shared_memory(device))
        times = []
        for shape in SHAPES:
            args = inputs(shape, head_dim, itemsize, "cuda")
            times.append({config: measure(config, args, itemsize) for config in options})
        chosen[head_dim, itemsize] = fastest(times)
        print(head_dim, itemsize, chosen[head_dim, itemsize], flush=True)
    print(f"# {torch.cuda.get_device_name(device)}\n{as_table(chosen)}")


if __name__ == "__main__":
    main()
