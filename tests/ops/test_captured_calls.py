"""Captured calls on the virtual GPU, as CUDA graphs hold them: what tensors hold when the graph is replayed counts, and
nothing of it was read on the host before. test_gpu.py asks the same of a real GPU."""

from dataclasses import fields

import op_args
import pytest
import torch
from op_args import CHANGES, MAKERS

import pagedkern
from pagedkern import vgpu
from pagedkern.testing import compare
from pagedkern.testing.backends import ALL_THREADS, BACKENDS, VGPU_OPS, Backend, by_name
from pagedkern.testing.cache_cases import GATHER_CASES, MERGE_CASES, MOVE_CASES, WRITE_CASES
from pagedkern.testing.cases import ATTENTION_CASES
from pagedkern.testing.judge import judge_attention
from pagedkern.testing.judge_cache import judge_gather, judge_merge, judge_move, judge_write

POISON = 0x7F
JUDGES = {
    judge_attention: ATTENTION_CASES, judge_write: WRITE_CASES, judge_gather: GATHER_CASES, judge_merge: MERGE_CASES,
    judge_move: MOVE_CASES,
}  # fmt: skip


class Captured(Backend):
    """Captures each call while every byte of its tensors is poison, puts back what was there, and replays."""

    def op(self, name, threads=ALL_THREADS):
        function = super().op(name, threads)
        if name not in VGPU_OPS:
            return function

        def call(*args, **kwargs):
            given = dict(enumerate(args)) | kwargs
            mapping = "block_mapping" if "block_mapping" in given else 2
            # One on the host is checked there, by contract; up to four pairs stand for that here.
            if name == "swap_blocks" or (name == "copy_blocks" and len(given[mapping]) <= 4):
                del given[mapping]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in op_args.tensors(given)}
            memory = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]
            before = [bytes_.clone() for bytes_ in memory]
            for bytes_ in memory:
                bytes_.fill_(POISON)
            try:
                with vgpu.capture() as graph:
                    function(*args, **kwargs)
                assert all((bytes_ == POISON).all() for bytes_ in memory), "something ran while it was captured"
            finally:
                for bytes_, old in zip(memory, before, strict=True):
                    bytes_.copy_(old)
            with self.session():
                graph.replay()

        return call


def captured(name):
    backend = by_name(name)
    return Captured(**{field.name: getattr(backend, field.name) for field in fields(backend)})


CUDA = captured("vgpu_random")
# Every seventh of each list, and all whose keys are shared out among blocks; of what Triton makes of them, where it
# compiles here, few.
CAPTURED = [(CUDA, 7), *((captured(b.name), 60) for b in BACKENDS if b.name == "triton_vgpu_random")]
SAMPLE = [
    pytest.param(backend, judge, case, id=f"{backend.name}-{judge.__name__}-{case.name}")
    for backend, every in CAPTURED
    for judge, cases in JUDGES.items()
    for i, case in enumerate(filter(backend.takes, cases))
    if backend is CUDA or case.op_name != "swap_blocks"  # which Triton's leaves to torch
    if i % every == 0 or (backend is CUDA and case.name.startswith(("splits", "rows", "heads")))
]


@pytest.mark.parametrize("capturing,judge,case", SAMPLE)
def test_nothing_that_tensors_hold_is_in_a_graph(capturing, judge, case):
    judge(capturing, case)


@pytest.mark.parametrize("op", sorted(VGPU_OPS - {"copy_blocks", "swap_blocks"}))
def test_a_graph_follows_what_its_tensors_hold(op):
    def arguments(seed, changes):
        torch.manual_seed(seed)
        return MAKERS[op]() | changes

    args, call = arguments(0, {}), getattr(torch.ops, vgpu.load_ops())
    with vgpu.capture() as graph:
        getattr(call, op)(**args)
    assert graph.num_nodes == 1
    for seed, changed in ((2, {}), (3, CHANGES[op]), (4, {})):
        fresh = arguments(seed, changed)
        for old, new in zip(op_args.tensors(args), op_args.tensors(fresh), strict=True):
            old.view(torch.uint8).copy_(new.view(torch.uint8))
        graph.replay()
        getattr(call, op)(**fresh)
        pairs = zip(op_args.tensors(args), op_args.tensors(fresh), strict=True)
        for index, (actual, expected) in enumerate(pairs):
            compare.assert_same_bytes(actual, expected, f"seed {seed}: tensor {index} of the arguments")


def test_a_graph_follows_a_mapping_on_the_device():
    """More pairs than four stand for one."""
    caches = [torch.randn(12, 4, 2, 16).bfloat16() for _ in range(2)]
    mapping = torch.tensor([[0, 6], [1, 7], [2, 8], [3, 9], [4, 10]])
    with vgpu.capture() as graph:
        getattr(torch.ops, vgpu.load_ops()).copy_blocks(caches[:1], caches[1:], mapping)
    mapping.copy_(torch.tensor([[0, 7], [5, 6], [-1, 8], [3, 12], [4, 11]]))
    before = [cache.clone() for cache in caches]
    graph.replay()
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[7, 6, 11]], old[[0, 5, 4]])
        assert torch.equal(cache[[0, 1, 2, 3, 4, 5, 8, 9, 10]], old[[0, 1, 2, 3, 4, 5, 8, 9, 10]])


def attention_call(seq_len, heads=(8, 2), **changes):
    """One sequence of up to 2,048 tokens; no workspace is given."""
    torch.manual_seed(seq_len)
    cache = [torch.randn(128, 16, heads[1], 64).bfloat16() for _ in range(2)]
    query = torch.randn(1, heads[0], 64).bfloat16()
    table = torch.randperm(128).int()[None]
    return dict(
        out=torch.empty_like(query), query=query, key_cache=cache[0], value_cache=cache[1], block_table=table,
        seq_lens=torch.tensor([seq_len], dtype=torch.int32), cu_seqlens_q=None, max_seqlen_q=1, max_seqlen_k=2048,
        scale=0.125,
    ) | changes  # fmt: skip


@pytest.mark.parametrize("heads", [(8, 2), (40, 1), (200, 1)], ids=str)
def test_one_graph_serves_every_length(heads):
    """Captured with no keys; who computes what is decided on the device."""
    attend = getattr(torch.ops, vgpu.load_ops()).paged_attention
    args = attention_call(0, heads)
    with vgpu.capture() as graph:
        attend(**args)
    for seq_len in (0, 1, 2048, 17, 1000):
        fresh = attention_call(seq_len, heads)
        for old, new in zip(op_args.tensors(args), op_args.tensors(fresh), strict=True):
            old.copy_(new)
        with vgpu.session(seed=seq_len) as session:
            graph.replay()
            attend(**fresh)
        assert torch.equal(args["out"], fresh["out"])
        replayed, called = session.reports
        assert replayed["grid"] == called["grid"]


def test_graphs_without_a_workspace_of_their_own():
    """The library's grows while they are captured, and what it outgrew stays theirs."""
    attend = getattr(torch.ops, vgpu.load_ops()).paged_attention
    calls = [attention_call(500 * n, (8 * n, 2 * n), num_splits=128) for n in (1, 2, 3)]
    graphs = []
    for args in calls:
        with vgpu.capture() as graph:
            attend(**args)
        graphs.append(graph)
    for args, graph in zip(calls, graphs, strict=True):
        graph.replay()
        out = args["out"].clone()
        attend(**args)
        assert torch.equal(out, args["out"])


def test_a_graph_holds_several_calls_in_their_order():
    ops = getattr(torch.ops, vgpu.load_ops())
    caches = [torch.randn(4, 16, 2, 64).bfloat16() for _ in range(2)]
    first, second = torch.tensor([[0, 1]]), torch.tensor([[1, 2]])
    with vgpu.capture() as graph:
        ops.copy_blocks(caches[:1], caches[1:], first)
        ops.copy_blocks(caches[:1], caches[1:], second)
        ops.swap_blocks(caches[0], caches[1], torch.tensor([[2, 3]]))
    assert graph.num_nodes == 3
    source = caches[0][0].clone()
    graph.replay()
    assert torch.equal(caches[0][2], source) and torch.equal(caches[1][3], source)


def test_check_mode_cannot_be_captured():
    """It reads what the tensors hold, and a capture does not wait for that."""
    args = MAKERS["reshape_and_cache"]()
    before = op_args.memory(args)
    with pytest.raises(RuntimeError, match="while a stream is captured"):
        with pagedkern.check_mode(True), vgpu.capture():
            getattr(torch.ops, vgpu.load_ops()).reshape_and_cache(**args)
    assert all(map(torch.equal, op_args.memory(args), before))
    with vgpu.capture():  # the one that failed has ended
        pass


def test_a_capture_is_ended_before_the_next_begins():
    with vgpu.capture() as graph:
        with pytest.raises(RuntimeError, match="captures already"):
            with vgpu.capture():
                pass
        with pytest.raises(RuntimeError, match="not captured to its end"):
            graph.replay()
    graph.replay()
    assert graph.num_nodes == 0


def test_a_fault_in_a_graph_is_a_kernel_fault():
    args = attention_call(40)
    with vgpu.capture() as graph:
        getattr(torch.ops, vgpu.load_ops()).paged_attention(**args)
    args["block_table"].fill_(1 << 20)
    with pytest.raises(vgpu.KernelFault, match="out_of_bounds"):
        graph.replay()
