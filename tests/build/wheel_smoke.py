"""Run by test_wheel.py with the installed wheel, outside the source tree, under more than one torch."""

import math
import sys

import torch

import pagedkern

BLOCK_SIZE, NUM_BLOCKS, KV_HEADS, HEADS, HEAD_DIM = 16, 8, 2, 4, 64


def written_cache(key, value, slots, dtype):
    caches = [torch.zeros(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2)]
    torch.ops.pagedkern.reshape_and_cache(key, value, *caches, slots)
    return caches


def attend(query, caches, table, lens):
    out = torch.full_like(query, float("nan"))
    scale = 1 / math.sqrt(HEAD_DIM)
    torch.ops.pagedkern.paged_attention(out, query, *caches, table, lens, None, 1, int(lens.max()), scale)
    return out


def expected(query, key, value):
    kv = [t.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1).float() for t in (key, value)]
    q = query.float().transpose(0, 1)
    return torch.nn.functional.scaled_dot_product_attention(q, *kv).transpose(0, 1)


def main():
    generator = torch.Generator().manual_seed(0)
    tokens = 37
    key, value = (torch.randn(tokens, KV_HEADS, HEAD_DIM, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(1, HEADS, HEAD_DIM, generator=generator).bfloat16()
    blocks = torch.tensor([5, 2, 7])
    slots = (blocks[torch.arange(tokens) // BLOCK_SIZE] * BLOCK_SIZE + torch.arange(tokens) % BLOCK_SIZE).long()
    table, lens = blocks.int()[None], torch.tensor([tokens], dtype=torch.int32)

    caches = written_cache(key, value, slots, torch.bfloat16)
    out = attend(query, caches, table, lens)
    torch.testing.assert_close(out.float(), expected(query, key, value), atol=2e-2, rtol=2e-2)

    fp8 = written_cache(key, value, slots, torch.float8_e4m3fn)
    stored = [c.view(torch.uint8).view(-1, KV_HEADS, HEAD_DIM)[slots].view(torch.float8_e4m3fn).float() for c in fp8]
    torch.testing.assert_close(attend(query, fp8, table, lens).float(), expected(query, *stored), atol=2e-2, rtol=2e-2)

    # Lists of tensors, mutated: the part of the ABI that moved last.
    torch.ops.pagedkern.copy_blocks(caches[:1], caches[1:], torch.tensor([[5, 0], [2, 1], [7, 3]]))
    moved = attend(query, caches, torch.tensor([[0, 1, 3]], dtype=torch.int32), lens)
    assert torch.equal(moved, out)

    try:
        torch.ops.pagedkern.reshape_and_cache(key[..., :8], value, *caches, slots)
    except RuntimeError as error:
        assert "reshape_and_cache" in str(error), error
    else:
        raise AssertionError("a wrong shape was taken")
    print(pagedkern.build_info())
    print(pagedkern.__file__)
    print(f"ran under torch {torch.__version__}")


if __name__ == "__main__":
    sys.exit(main())
