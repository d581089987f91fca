"""What only a GPU can show: streams, graphs, transfers, and caches that hold more than 2^31 elements."""

import op_args
import pytest
import torch
from op_args import CHANGES, MAKERS, int32

import pagedkern
from pagedkern.testing import compare
from pagedkern.testing.backends import by_name, hopper

pytestmark = pytest.mark.skipif(not hopper(), reason="needs a Hopper GPU")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
OPS = [name for name in MAKERS if by_name("cuda").has([name]) and name != "paged_attention_workspace_size"]


def to_gpu(op: str, args: dict) -> dict:
    """Copies on the GPU; swap_blocks reads its mapping on the host."""

    def move(name, value):
        if isinstance(value, list):
            return [item.cuda() for item in value]
        stays = not isinstance(value, torch.Tensor) or (op == "swap_blocks" and name == "block_mapping")
        return value if stays else value.cuda()

    return {name: move(name, value) for name, value in args.items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor


def fill(target: dict, source: dict) -> None:
    """The contents of one set of arguments into another, on the current stream."""
    for old, new in zip(op_args.tensors(target), op_args.tensors(source), strict=True):
        if old.device.type == "cuda":
            as_bytes(old).copy_(as_bytes(new))


def same(got: dict, wanted: dict, what: str) -> None:
    pairs = zip(op_args.tensors(got), op_args.tensors(wanted), strict=True)
    for index, (actual, expected) in enumerate(pairs):
        compare.assert_same_bytes(actual, expected, f"{what}: tensor {index} of the arguments")


def arguments(op: str, seed: int = 0, **changes) -> dict:
    torch.manual_seed(seed)
    return MAKERS[op]() | changes


def run(op: str, args: dict) -> None:
    getattr(torch.ops.pagedkern, op)(**args)


@pytest.mark.parametrize("op", OPS)
def test_work_goes_to_the_current_stream(op):
    """The inputs arrive late on a side stream; nothing waits for them but the stream."""
    given = to_gpu(op, arguments(op))
    late, expected = (to_gpu(op, arguments(op, seed=1)) for _ in range(2))
    fill(expected, given)
    run(op, expected)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        fill(late, given)
        run(op, late)
    stream.synchronize()
    same(late, expected, "on a side stream")


@pytest.mark.parametrize("op", OPS)
def test_a_graph_follows_what_its_tensors_hold(op):
    args = to_gpu(op, arguments(op))
    run(op, args)  # warm up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(op, args)
    for seed, changes in ((2, {}), (3, CHANGES[op]), (4, {})):
        fresh = to_gpu(op, arguments(op, seed, **changes))
        fill(args, fresh)
        graph.replay()
        run(op, fresh)
        torch.cuda.synchronize()
        same(args, fresh, f"replay with seed {seed}")


def test_many_tokens_in_a_graph():
    """So many that blocks work in teams: the launch is another one."""
    rows = torch.randn(3000, 2, 64, device="cuda").to(BF16)
    caches = [torch.zeros(256, 16, 2, 64, device="cuda", dtype=BF16) for _ in range(2)]
    slots = torch.randperm(4096, device="cuda")[:3000].contiguous()
    torch.ops.pagedkern.reshape_and_cache(rows, -rows, *caches, slots)  # warm up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.pagedkern.reshape_and_cache(rows, -rows, *caches, slots)
    for _ in range(3):
        slots.copy_(torch.randperm(4096, device="cuda")[:3000])
        graph.replay()
        assert torch.equal(caches[0].view(4096, 2, 64)[slots], rows)
        assert torch.equal(caches[1].view(4096, 2, 64)[slots], -rows)


@pytest.mark.parametrize("num_heads", [200, 1024], ids=["clusters_of_2", "clusters_of_8"])
def test_many_heads_in_a_graph(num_heads):
    """So many that a cluster of blocks shares what it loads, and the keys are shared out among clusters."""
    caches = [torch.randn(140, 16, 1, 128, device="cuda").to(BF16) for _ in range(2)]
    query = torch.randn(2, num_heads, 128, device="cuda").to(BF16)
    out, lens, table = torch.zeros_like(query), int32(1000, 20).cuda(), torch.arange(140).int().view(2, 70).cuda()

    def attend(to: torch.Tensor) -> None:
        torch.ops.pagedkern.paged_attention(to, query, *caches, table, lens, None, 1, 1120, 128**-0.5)

    attend(out)  # warm up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(out)
    for lengths in ((0, 1120), (33, 1), (1120, 500)):
        lens.copy_(int32(*lengths))
        table.copy_(torch.randperm(140).int().view(2, 70))
        graph.replay()
        expected = torch.full_like(out, float("nan"))
        attend(expected)
        torch.cuda.synchronize()
        compare.assert_same_bytes(out, expected, f"replay with lengths {lengths}")


def test_a_graph_follows_its_scales():
    rows = torch.randn(3, 2, 16, device="cuda").to(BF16)
    caches = [torch.zeros(5, 4, 2, 16, device="cuda").to(E4M3) for _ in range(2)]
    scale, slots = torch.ones(1, device="cuda"), torch.tensor([0, 7, 19], device="cuda")
    torch.ops.pagedkern.reshape_and_cache(rows, rows, *caches, slots, scale, scale)  # warm up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.pagedkern.reshape_and_cache(rows, rows, *caches, slots, scale, scale)
    for value in (1.0, 0.5, 4.0):
        scale.fill_(value)
        graph.replay()
        expected = [torch.zeros_like(cache.view(torch.uint8)).view(E4M3) for cache in caches]
        torch.ops.pagedkern.reshape_and_cache(rows, rows, *expected, slots, scale, scale)
        for cache, wanted in zip(caches, expected, strict=True):
            got = cache.view(torch.uint8).view(20, 2, 16)[slots]
            assert torch.equal(got, wanted.view(torch.uint8).view(20, 2, 16)[slots]), f"scale {value}"


# ---- transfers


@pytest.mark.parametrize("pairs", [1, 3, 60_000])
@pytest.mark.parametrize("side", [False, True], ids=["default_stream", "side_stream"])
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_swap_out_and_back(pinned, side, pairs):
    cache = torch.randn(pairs, 2, 1, 8, device="cuda").to(BF16)
    wanted = cache.clone()
    host = torch.zeros(pairs, 2, 1, 8, dtype=BF16, pin_memory=pinned)
    order = torch.randperm(pairs)
    out, back = torch.stack([torch.arange(pairs), order], 1), torch.stack([order, torch.arange(pairs)], 1)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        torch.ops.pagedkern.swap_blocks(cache, host, out)
        cache.zero_()  # at once another's: the copy before it must have had its turn
        torch.ops.pagedkern.swap_blocks(host, cache, back)
    stream.synchronize()
    assert torch.equal(cache, wanted) and torch.equal(host[order], wanted.cpu())


def test_swap_on_one_device_merges_and_keeps_order():
    source, target = (torch.randn(40, 16, 2, 64, device="cuda").to(BF16) for _ in range(2))
    mapping = torch.tensor([(i, 39 - i) for i in range(10)] + [(20 + i, 5 + i) for i in range(10)])
    expected = target.clone()
    expected[mapping[:, 1].cuda()] = source[mapping[:, 0].cuda()]
    torch.ops.pagedkern.swap_blocks(source, target, mapping)
    assert torch.equal(target, expected)
    heads = source.transpose(1, 2)  # blocks that are no runs of memory
    torch.ops.pagedkern.swap_blocks(heads, target.view(40, 2, 16, 64), mapping)
    assert torch.equal(target.view(40, 2, 16, 64)[mapping[:, 1].cuda()], heads[mapping[:, 0].cuda()])


def test_host_block_is_reused_after_an_event():
    """Swap out behind a long kernel, wait for an event, overwrite the host's block, swap it in."""
    cache = torch.arange(64.0, device="cuda").view(4, 1, 1, 16).contiguous()
    host = torch.zeros(2, 1, 1, 16, pin_memory=True)
    before = cache.clone()
    torch.cuda._sleep(100_000_000)
    torch.ops.pagedkern.swap_blocks(cache, host, torch.tensor([[1, 0]]))
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert torch.equal(host[0], before[1].cpu())
    host[0].fill_(7)
    torch.ops.pagedkern.swap_blocks(host, cache, torch.tensor([[0, 2]]))
    torch.cuda.synchronize()
    assert (cache[2] == 7).all() and torch.equal(cache[1], before[1])


@pytest.mark.parametrize("mapping", [[(0, 6)], [(4, 0)], [(-1, 0)], [(0, 0), (1, 0)]], ids=str)
def test_swap_checks_its_mapping(mapping):
    source, target = torch.randn(4, 2, 1, 8, device="cuda"), torch.zeros(6, 2, 1, 8)
    with pytest.raises(RuntimeError, match="block_mapping"):
        torch.ops.pagedkern.swap_blocks(source, target, torch.tensor(mapping))
    with pytest.raises(RuntimeError, match="block_mapping"):
        torch.ops.pagedkern.swap_blocks(source, target, torch.tensor([[0, 0]], device="cuda"))
    assert not target.any()


@pytest.mark.parametrize("on_host", [False, True], ids=["device_mapping", "host_mapping"])
def test_copy_of_more_blocks_than_a_grid_holds(on_host):
    count = 70_000
    caches = [torch.randn(2 * count, 1, 1, 8, device="cuda").to(BF16) for _ in range(4)]
    order = torch.randperm(count) + count
    mapping = torch.stack([torch.arange(count), order], 1)
    torch.ops.pagedkern.copy_blocks(caches[:2], caches[2:], mapping if on_host else mapping.cuda())
    for cache in caches:
        assert torch.equal(cache[order.cuda()], cache[:count])


# ---- more than 2^31 elements

BLOCKS, EDGE = 131072 + 2, 131072 * 16


@pytest.fixture(scope="module")
def large_caches():
    return [torch.zeros(BLOCKS, 16, 8, 128, device="cuda", dtype=BF16) for _ in range(2)]


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_cache_beyond_2_31_elements(large_caches, slot_dtype):
    ops = torch.ops.pagedkern
    slots = torch.tensor([EDGE - 1, EDGE, EDGE + 1, EDGE + 19], device="cuda", dtype=slot_dtype)
    rows = torch.randint(-8, 9, (4, 8, 128), device="cuda").to(BF16)
    for cache in large_caches:
        cache[0] = 0
        cache[-3:] = 0
    ops.reshape_and_cache(rows, -rows, *large_caches, slots)
    for cache, sign in zip(large_caches, (1, -1), strict=True):
        assert torch.equal(cache.view(-1, 8, 128)[slots.long()], sign * rows)
        assert not cache[0].any()
    table, lens = torch.tensor([[131072, 131073]], device="cuda").int(), torch.tensor([20], device="cuda").int()
    key, value = (torch.zeros(20, 8, 128, device="cuda", dtype=BF16) for _ in range(2))
    ops.gather_cache(key, value, *large_caches, table, lens, torch.tensor([0, 20], device="cuda").int())
    assert torch.equal(key[[0, 1, 19]], rows[1:]) and torch.equal(value[[0, 1, 19]], -rows[1:])
    assert not key[2:19].any() and not value[2:19].any()
    ops.copy_blocks(large_caches[:1], large_caches[1:], torch.tensor([[131072, 0]], device="cuda"))
    assert all(torch.equal(cache[0], cache[131072]) for cache in large_caches)
    host = torch.zeros(1, 16, 8, 128, dtype=BF16, pin_memory=True)
    ops.swap_blocks(large_caches[0], host, torch.tensor([[131072, 0]]))
    torch.cuda.synchronize()
    assert torch.equal(host[0].cuda(), large_caches[0][131072])


@pytest.mark.parametrize("num_tokens", [1, 20], ids=["decode", "prefill"])
def test_attention_beyond_2_31_elements(large_caches, num_tokens):
    """The same call over the last pages and over a copy of them: the same bits."""
    for cache in large_caches:
        cache[-3:] = torch.randn(3, 16, 8, 128, device="cuda").to(BF16)
    query = torch.randn(num_tokens, 32, 128, device="cuda").to(BF16)
    lens, starts = int32(20).cuda(), int32(0, num_tokens).cuda()

    def attend(caches: list[torch.Tensor], pages: list[int]) -> torch.Tensor:
        out = torch.full_like(query, float("nan"))
        table = int32(*pages)[None].cuda()
        torch.ops.pagedkern.paged_attention(out, query, *caches, table, lens, starts, num_tokens, 20, 128**-0.5)
        return out

    far = attend(large_caches, [BLOCKS - 2, BLOCKS - 1])
    assert torch.equal(far, attend([cache[-3:].clone() for cache in large_caches], [1, 2]))
    assert far.isfinite().all()


# ---- values on the device


@pytest.mark.parametrize(
    "op,changes,words",
    [
        ("reshape_and_cache", {"slot_mapping": torch.tensor([0, 1, 20])}, "slot_mapping[2] is 20"),
        ("rope_reshape_and_cache", {"positions": torch.tensor([0, 1, 10])}, "positions[2] is 10"),
        ("gather_cache", {"block_table": torch.tensor([[0, 1], [2, -2], [4, 0]]).int()}, "block_table[1, 1] is -2"),
        ("copy_blocks", {"block_mapping": torch.tensor([[0, 1], [5, 2]])}, "block_mapping[1, 0] is 5"),
    ],
)
def test_check_mode_reads_the_device(op, changes, words):
    args = to_gpu(op, arguments(op, **changes))
    before = [tensor.clone() for tensor in op_args.tensors(args)]
    with pagedkern.check_mode(True), pytest.raises(RuntimeError) as raised:
        run(op, args)
    assert words in str(raised.value)
    for old, new in zip(before, op_args.tensors(args), strict=True):
        compare.assert_same_bytes(new, old, "arguments of a call that raised")
