"""Graphs of launches, as a CUDA graph would hold them."""

import contextlib

from pagedkern.vgpu._core import core


class Graph:
    """The launches and copies that were made inside a `capture`, with the arguments they had then.

    As a CUDA graph it holds addresses: tensors must be kept by others, and what they hold when it is replayed counts.
    """

    def __init__(self):
        self._captured = None

    @property
    def num_nodes(self) -> int:
        """Launches, copies and fills."""
        return self._ended().size()

    def replay(self) -> None:
        """Does it all in order, in the session that is open now. A kernel's fault is a `KernelFault`."""
        self._ended().launch()

    def _ended(self):
        if self._captured is None:
            raise RuntimeError("this graph was not captured to its end")
        return self._captured


@contextlib.contextmanager
def capture():
    """Inside the `with` nothing that this thread gives to the virtual GPU runs, be it by `torch.ops.pagedkern_vgpu.*`
    or by a `Module`: the Graph that it yields holds it when the `with` has ended.

    What a stream cannot do while it is captured (wait for results, allocate) is an error there and then, and a
    RuntimeError at the end.
    """
    if not core.begin_capture():
        raise RuntimeError("this thread captures already")
    graph = Graph()
    try:
        yield graph
    except BaseException:
        core.end_capture()
        raise
    graph._captured = core.end_capture()
    if graph._captured is None:
        raise RuntimeError("the capture was broken by a call that waits for the device or allocates on it")
