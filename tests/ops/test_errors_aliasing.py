"""Which shared memory is an error: exactly what a write would corrupt, not what merely lies interleaved."""

import random

import pytest
import torch
from op_args import BF16, BLOCK_SIZE, BLOCKS, DIM, HEADS, KV_HEADS, MAKERS, TOKENS

from pagedkern import kv_layout


def test_slices_of_one_fused_qkv_pass(backend):
    qkv = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, DIM).to(BF16)
    query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    args = MAKERS["rope_reshape_and_cache"]() | {"query": query, "key": key, "value": value}
    apart = {name: args[name].clone() for name in args if isinstance(args[name], torch.Tensor)}
    backend.op("rope_reshape_and_cache")(**args)
    backend.op("rope_reshape_and_cache")(**(args | apart))
    for name in ("query", "key", "key_cache", "value_cache"):
        assert torch.equal(args[name], apart[name])


@pytest.mark.parametrize("layout", kv_layout.LAYOUTS)
def test_every_layout_of_the_caches_passes(layout, backend):
    key_cache, value_cache = kv_layout.allocate(layout, BLOCKS, BLOCK_SIZE, KV_HEADS, DIM, BF16)
    args = MAKERS["reshape_and_cache"]() | {"key_cache": key_cache, "value_cache": value_cache}
    backend.op("reshape_and_cache")(**args)
    assert torch.equal(key_cache[1, 3], args["key"][1]) and torch.equal(value_cache[4, 3], args["value"][2])
    mapping = torch.tensor([[1, 2]])
    backend.op("copy_blocks")([key_cache], [value_cache], mapping)
    backend.op("swap_blocks")(key_cache, value_cache, torch.tensor([[1, 3]]))
    assert torch.equal(key_cache[2], key_cache[1]) and torch.equal(value_cache[3], key_cache[1])


def test_out_and_query_as_odd_and_even_rows_pass(backend):
    buffer = torch.randn(2 * TOKENS, HEADS, DIM).to(BF16)
    args = MAKERS["paged_attention"]()
    expected = args["out"].clone()
    backend.op("paged_attention")(**(args | {"out": expected}))
    buffer[::2] = args["query"]
    backend.op("paged_attention")(**(args | {"out": buffer[1::2], "query": buffer[::2]}))
    assert torch.equal(buffer[1::2], expected) and torch.equal(buffer[::2], args["query"])


@pytest.mark.parametrize("part", ["a", "b"])
def test_merge_in_place_passes(part, backend):
    args = MAKERS["merge_attention_states"]()
    expected = args["out"].clone()
    backend.op("merge_attention_states")(**(args | {"out": expected}))
    args |= {"out": args[f"out_{part}"], "lse": args[f"lse_{part}"]}
    backend.op("merge_attention_states")(**args)
    assert torch.equal(args["out"], expected)


def test_a_query_row_repeated_by_stride_0_passes(backend):
    args = MAKERS["paged_attention"]()
    args["query"] = args["query"][:1, :1].expand(TOKENS, HEADS, DIM)
    backend.op("paged_attention")(**args)


def random_view(rng, buffer):
    shape = (TOKENS, HEADS)
    strides = tuple(rng.choice([0, 1, 2, 3, 4, 5, 7, 8, 12, 13]) for _ in shape)
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.as_strided(buffer, shape, strides, rng.randrange(buffer.numel() - reach))


def places(tensor):
    strides = tensor.stride()
    return [tensor.storage_offset() + i * strides[0] + j * strides[1] for i in range(TOKENS) for j in range(HEADS)]


@pytest.mark.parametrize("seed", range(8))
def test_overlap_is_found_exactly(seed, backend):
    """lse may have any strides: 100 random pairs in one buffer against the sets of elements they name."""
    rng = random.Random(seed)
    outcomes = set()
    for _ in range(100):
        buffer = torch.zeros(100)
        args = MAKERS["merge_attention_states"]()
        lse, lse_a = random_view(rng, buffer), random_view(rng, buffer)
        itself = len(set(places(lse))) < len(places(lse))
        meets = bool(set(places(lse)) & set(places(lse_a))) and places(lse) != places(lse_a)
        outcomes.add((itself, meets))
        what = (lse.stride(), lse.storage_offset(), lse_a.stride(), lse_a.storage_offset())
        try:
            backend.op("merge_attention_states")(**(args | {"lse": lse, "lse_a": lse_a}))
            assert not itself and not meets, what
        except RuntimeError as error:
            assert ("overlap itself" in str(error)) == itself and (itself or meets), what
    assert len(outcomes) == 4
