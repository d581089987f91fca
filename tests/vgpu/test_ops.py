"""torch.ops.pagedkern_vgpu: what the cases that all backends share do not ask of it."""

import pytest
import torch

import pagedkern
from pagedkern import vgpu
from pagedkern.testing.backends import BACKENDS, VGPU_OPS

ORDERS = [backend for backend in BACKENDS if backend.namespace == "pagedkern_vgpu"]
E4M3 = torch.float8_e4m3fn
OPS = {
    "reshape_and_cache", "reshape_and_cache_dynamic", "rope_reshape_and_cache", "paged_attention",
    "merge_attention_states", "gather_cache", "copy_blocks", "swap_blocks",
}  # fmt: skip


@pytest.fixture(scope="module")
def ops():
    return getattr(torch.ops, vgpu.load_ops())


def caches(blocks=6, block_size=4, heads=2, head_dim=64, dtype=torch.bfloat16):
    return [torch.randn(blocks, block_size, heads, head_dim).to(dtype) for _ in range(2)]


def test_the_orders_are_three_seeds_and_three_modes():
    assert {backend.order for backend in ORDERS} == {(0, "late"), (1, "early"), (2, "random")}


def test_the_smallest_kernel(ops):
    for count in (0, 1, 4, 1003):
        x, y = torch.randn(count + 1)[1:], torch.randn(count)
        expected = (y.double() + 0.5 * x.double()).float()
        with vgpu.session() as session:
            ops._smoke_add(x, y, 0.5)
        assert torch.equal(y, expected) and len(session.reports) == (count > 0)


def test_every_op_has_a_kernel(ops):
    assert VGPU_OPS == OPS
    assert all(hasattr(ops, name) for name in OPS)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
def test_a_slot_outside_the_cache_writes_nothing(order, dtype):
    key, value = caches(dtype=dtype)
    before = [c.view(torch.uint8).clone() for c in (key, value)]
    rows = torch.randn(5, 2, 64).bfloat16()
    for slot_dtype in (torch.int32, torch.int64):
        slots = torch.tensor([24, -1, 2**31 - 1, -(2**31), 25], dtype=slot_dtype)
        order.op("reshape_and_cache")(rows, rows, key, value, slots)
    order.op("reshape_and_cache")(rows[:2], rows[:2], key, value, torch.tensor([2**40, -(2**60)]))
    assert all(torch.equal(c.view(torch.uint8), b) for c, b in zip((key, value), before, strict=True))
    with pagedkern.check_mode(True), pytest.raises(RuntimeError, match=r"slot_mapping\[0\] is 24"):
        order.op("reshape_and_cache")(rows, rows, key, value, torch.tensor([24, 1, 2, 3, 4]))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_a_device_mapping_skips_ids_out_of_range(order):
    """More pairs than the bindings read on the host go to the kernel as they are."""
    key, value = caches(blocks=12)
    expected = [c.clone() for c in (key, value)]
    for cache in expected:
        cache[6], cache[9] = cache[0], cache[3]
    pairs = torch.tensor([(0, 6), (12, 7), (1, 12), (-1, 8), (3, 9), (2, -5), (2**40, 10), (4, 2**33)])
    order.op("copy_blocks")([key], [value], pairs)
    assert torch.equal(key, expected[0]) and torch.equal(value, expected[1])
    with pagedkern.check_mode(True), pytest.raises(RuntimeError, match=r"block_mapping\[1, 0\] is 12"):
        order.op("copy_blocks")([key], [value], pairs)


@pytest.mark.parametrize("pairs", [1, 4, 5, 300])
def test_copy_blocks_takes_one_launch_for_all_layers(ops, pairs):
    layers = [caches(blocks=2 * pairs, block_size=1, heads=1, head_dim=8) for _ in range(70)]
    expected = [[c.clone() for c in pair] for pair in layers]
    mapping = torch.stack([torch.arange(pairs), torch.arange(pairs) + pairs], 1)
    for pair in expected:
        for cache in pair:
            cache[pairs:] = cache[:pairs]
    with vgpu.session() as session:
        ops.copy_blocks([k for k, _ in layers], [v for _, v in layers], mapping)
    assert len(session.reports) == 1
    for pair, wanted in zip(layers, expected, strict=True):
        assert all(torch.equal(got, want) for got, want in zip(pair, wanted, strict=True))


def test_traffic_of_a_copy_is_what_must_move(ops):
    """Rows of 16-byte vectors: every byte of two blocks read once and written once."""
    key, value = caches(blocks=4, block_size=16, heads=8, head_dim=128)
    with vgpu.session() as session:
        ops.copy_blocks([key], [value], torch.tensor([[0, 2], [1, 3]]))
    (report,) = session.reports
    moved = 2 * 2 * 16 * 8 * 128 * 2
    assert report["global_load_bytes"] == report["global_store_bytes"] == moved
    assert report["unique_global_write_bytes"] <= moved + 4 * 32  # torch aligns storage to 64 bytes, sectors are 32
    assert report["global_store_sectors"] == moved // 32


def test_a_fault_in_an_op_is_named_and_located(ops):
    """The device's memory holds what the op was given and nothing else, so that a kernel's stray access is found."""
    rows, (key, value) = torch.randn(40, 2, 64).bfloat16(), caches()
    with vgpu.session(max_warp_instructions=20), pytest.raises(RuntimeError) as caught:
        ops.reshape_and_cache(rows, rows, key, value, torch.arange(24))
    text = str(caught.value)
    for part in ("budget", "reshape_and_cache_kernel", "block (", "thread (", "PTX line ", "cache_write/kernel.cuh:"):
        assert part in text, text
    ops.reshape_and_cache(rows, rows, key, value, torch.arange(24))  # the next call is as if nothing had been
    assert torch.equal(key.view(24, 2, 64), rows[:24])


def test_float32_has_no_kernel(ops):
    rows, (key, value) = torch.zeros(3, 2, 64), caches(dtype=torch.float32)
    with pytest.raises(RuntimeError, match="^reshape_and_cache: key_cache must be bfloat16"):
        ops.reshape_and_cache(rows, rows, key, value, torch.arange(3))


def test_fakes_are_registered(ops):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        key, value = caches()
        ops.copy_blocks([key], [value], torch.tensor([[0, 1]]))


def test_loading_twice_is_loading_once(ops):
    assert vgpu.load_ops() == vgpu.load_ops() == "pagedkern_vgpu"


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_strides_beyond_2_31_bytes(order):
    """Three blocks, tokens or heads 2^30 elements apart, in one lazily committed allocation."""
    far = 2**30
    bases = [torch.empty(3 * far, dtype=torch.uint8) for _ in range(2)]
    rows = torch.randint(-8, 9, (3, 3, 8)).bfloat16()
    for strides in ((32, 8, far), (32, far, 8), (far, 32, 8)):
        pair = [base.as_strided((3, 3, 3, 8), (*strides, 1), 64).zero_().view(E4M3) for base in bases]
        order.op("reshape_and_cache")(rows, -rows, *pair, torch.arange(6, 9))
        assert torch.equal(pair[0][2].bfloat16(), rows) and torch.equal(pair[1][2].bfloat16(), -rows)
        assert not any(cache.view(torch.uint8)[:2].any() for cache in pair)
        order.op("copy_blocks")(pair[:1], pair[1:], torch.tensor([[2, 0]]))
        assert torch.equal(pair[0][0].bfloat16(), rows) and torch.equal(pair[1][0].bfloat16(), -rows)
        assert not any(cache.view(torch.uint8)[1].any() for cache in pair)
