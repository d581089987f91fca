"""Microseconds from Python to the kernel and back, per op call: one token, one sequence, next to nothing to compute.

    python -m bench.bench_call_overhead

An engine makes two of these calls per layer and step. `packet` is torch.ops.pagedkern.x(...), `default` the overload
torch.ops.pagedkern.x.default(...), `ops` pagedkern.ops.x(...).
"""

import time

import torch

import pagedkern

KV_HEADS, HEADS, DIM, BLOCK_SIZE = 1, 1, 8, 16


def microseconds(call, repeats=15, calls=1000):
    """The best of several rounds: everything above it is another process's work."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def cases():
    row = torch.randn(1, KV_HEADS, DIM).bfloat16()
    key_cache, value_cache = (torch.zeros(4, BLOCK_SIZE, KV_HEADS, DIM).bfloat16() for _ in range(2))
    slots, positions = torch.tensor([1]), torch.tensor([1])
    table, seq_lens = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    query, out = (torch.zeros(1, HEADS, DIM).bfloat16() for _ in range(2))
    cos_sin = torch.randn(4, DIM)
    yield "reshape_and_cache", (row, row.clone(), key_cache, value_cache, slots)
    yield "rope_reshape_and_cache", (query, row, row.clone(), key_cache, value_cache, positions, cos_sin, slots)
    yield "paged_attention", (out, query, key_cache, value_cache, table, seq_lens, None, 1, 32, 0.3)
    lse = torch.zeros(1, HEADS)
    yield "merge_attention_states", (out, lse, query, lse.clone(), query.clone(), lse.clone())
    yield "copy_blocks", ([key_cache], [value_cache], torch.tensor([[0, 1]]))
    yield "paged_attention_workspace_size", (1, HEADS, KV_HEADS, DIM, 1, 1, 32)


def live_tables():
    """What looking at every live page id costs on the CPU: 64 sequences of 4096 tokens, 16 a page."""
    table = torch.arange(64 * 256, dtype=torch.int32).view(64, 256) % 4
    cache = torch.zeros(4, BLOCK_SIZE, KV_HEADS, DIM).bfloat16()
    query = torch.zeros(64, HEADS, DIM).bfloat16()
    lengths = torch.full((64,), 4096, dtype=torch.int32)
    # The largest id of the last page is wrong: the call reads every table, raises, and computes nothing.
    table[63, 255] = 4

    def call():
        try:
            torch.ops.pagedkern.paged_attention(query.clone(), query, cache, cache, table, lengths, None, 1, 4096, 0.3)
        except RuntimeError:
            return
        raise AssertionError("the wrong page id passed")

    few = microseconds(call, calls=200)
    table[0, 0] = 4
    return few - microseconds(call, calls=200)


def main():
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, us per call")
    print(f"{'op':<32}{'packet':>8}{'default':>9}{'ops':>7}")
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            print(f"-- {mode.__name__}")
            for name, args in cases():
                packet = getattr(torch.ops.pagedkern, name)
                calls = (packet, packet.default, getattr(pagedkern.ops, name))
                times = [microseconds(lambda call=call, args=args: call(*args)) for call in calls]
                print(f"{name:<32}{times[0]:>8.1f}{times[1]:>9.1f}{times[2]:>7.1f}")
    print(f"live page ids of 64 x 4096 tokens, 16384 pages: {live_tables():.1f} us")


if __name__ == "__main__":
    main()
