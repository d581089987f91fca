"""What stands for torch.cuda.CUDAGraph where there is no GPU: it records the tensor operations of a step while they
run, and replays those, none of the Python around them.

As on a GPU: an operation whose result the host waits for cannot be captured; numbers and shapes are those of the
capture, what tensors hold is that of the replay; graphs of one pool share their memory, so that a replay destroys what
other graphs have left. The ops of the virtual GPU are captured as the launches they make.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedkern import vgpu

WAITING = {
    "aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::masked_select",
    "aten::equal", "aten::unique2", "aten::repeat_interleave",
}  # fmt: skip


def _tensors(values) -> list[torch.Tensor]:
    """All but weights that oneDNN has packed, which have no storage and never change."""
    leaves = tree_leaves(values)
    return [value for value in leaves if isinstance(value, torch.Tensor) and value.layout == torch.strided]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedGraph:
    _pools: dict[object, list[torch.Tensor]] = {}  # what the graphs of each pool have made

    def __init__(self):
        self._calls = []
        self._pool = self

    def pool(self):
        return self._pool

    def replay(self) -> None:
        for tensor in self._pools.get(self._pool, []):
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0x7F)
        for call in self._calls:
            call()

    def record(self, function, args, kwargs):
        name = function._schema.name
        by_mask = name.startswith("aten::index") and any(t.dtype == torch.bool for t in _tensors(args[1:2]))
        if name in WAITING or by_mask:
            raise RuntimeError(f"{name} waits for its result: a captured stream cannot")
        if function.namespace == vgpu.load_ops():
            with vgpu.capture() as graph:
                result = function(*args, **kwargs)
            self._calls.append(graph.replay)
            return result
        result = function(*args, **kwargs)
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        made = [tensor for tensor in _tensors(result) if _storage(tensor) not in given]
        self._pools.setdefault(self._pool, []).extend(made)
        if made or function._schema.is_mutable:  # else a view

            def call():
                again = [t for t in _tensors(function(*args, **kwargs)) if _storage(t) not in given]
                for old, new in zip(made, again, strict=True):
                    old.copy_(new)

            self._calls.append(call)
        return result


class _Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph):
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self._graph.record(function, args, kwargs or {})


@contextmanager
def graph(recorded: RecordedGraph, pool=None, capture_error_mode="global"):
    """As torch.cuda.graph."""
    recorded._pool = pool or recorded
    with _Recording(recorded):
        yield


class Stream:
    """As torch.cuda.Stream, where all work has been done when it is asked for."""

    def wait_stream(self, other) -> None:
        pass


def replace_cuda(monkeypatch) -> None:
    """Of torch.cuda, what a capture uses."""

    @contextmanager
    def stream(_):
        yield

    for name, value in (
        ("CUDAGraph", RecordedGraph), ("graph", graph), ("Stream", Stream), ("stream", stream),
        ("current_stream", Stream),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
