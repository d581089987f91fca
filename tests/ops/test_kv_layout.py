"""pagedkern.kv_layout: each layout has the memory order its name says; sizes add up."""

import pytest
import torch

from pagedkern import kv_layout

N, S, H, D = 3, 4, 2, 8
# Where the element (block, token, head, dim) of K and of V lies, from the start of their memory, shared or their own.
PLACES = {
    "NHD": lambda n, s, h, d, v: ((n * S + s) * H + h) * D + d,
    "HND": lambda n, s, h, d, v: ((n * H + h) * S + s) * D + d,
    "N2": lambda n, s, h, d, v: (((n * 2 + v) * S + s) * H + h) * D + d,
    "N2_HND": lambda n, s, h, d, v: (((n * 2 + v) * H + h) * S + s) * D + d,
    "packed": lambda n, s, h, d, v: ((n * S + s) * H + h) * 2 * D + v * D + d,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("layout", kv_layout.LAYOUTS)
def test_memory_order(layout, dtype):
    caches = kv_layout.allocate(layout, N, S, H, D, dtype)
    for v, cache in enumerate(caches):
        assert cache.shape == (N, S, H, D) and cache.dtype == dtype and not cache.view(torch.uint8).any()
        for index in ((0, 0, 0, 0), (2, 1, 1, 3), (1, 3, 0, 7)):
            place = sum(i * stride for i, stride in zip(index, cache.stride(), strict=True)) + cache.storage_offset()
            assert place == PLACES[layout](*index, v)
    shared = caches[0].untyped_storage().data_ptr() == caches[1].untyped_storage().data_ptr()
    assert shared == (layout not in ("NHD", "HND"))
    assert kv_layout.layout_of(*caches) == layout


def test_other_strides_have_no_name():
    key_cache, value_cache = kv_layout.allocate("NHD", N, 2 * S, H, D, torch.float16)
    assert kv_layout.layout_of(key_cache[:, ::2], value_cache[:, ::2]) is None


def test_unknown_layout():
    with pytest.raises(ValueError, match="NHD, HND, N2, N2_HND, packed, got 'NDH'"):
        kv_layout.allocate("NDH", N, S, H, D, torch.float16)


def test_sizes():
    # performance.md: 4096 bytes a token and layer in bf16, 2048 in FP8, for 8 KV heads of 128.
    assert kv_layout.bytes_per_token(8, 128, torch.bfloat16) == 4096
    assert kv_layout.bytes_per_token(8, 128, torch.float8_e4m3fn, num_layers=2) == 4096
    assert kv_layout.bytes_per_token(8, 128, torch.float8_e4m3fn, scales=True) == 2048 + 64
    assert kv_layout.num_blocks_in(4096 * 16 * 3 - 1, 16, 4096) == 2


def test_scales():
    for scale in kv_layout.allocate_scales(N, S, H):
        assert scale.shape == (N, S, H) and scale.dtype == torch.float32 and bool((scale == 1).all())
