"""Starts the processes of a tensor parallel engine, and leads them.

    llm = launch(model, tensor_parallel_size=2, ...)     # then as any LLM, and close() at the end

The leader passes every call on to the others, who make it too: given the same calls, an engine takes the same steps.
Under torchrun there is no need for this: every process makes an LLM of its own and the same calls.
"""

import atexit
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from engine_min.config import EngineConfig
from engine_min.engine import LLM

_PATIENCE = timedelta(days=365)  # a server may be idle for long


def launch(model: str, **options) -> LLM:
    """An LLM whose layers are shared by so many processes: this one, and others that it starts."""
    size = EngineConfig(model, **options).tensor_parallel_size
    return (LLM if size == 1 else LeadingLLM)(model, **options)


def _join(store: dist.Store, rank: int, size: int) -> None:
    """Joins the processes. Calls, which are Python objects, go from host to host."""
    backend = "gloo"
    if torch.cuda.is_available():
        if torch.cuda.device_count() < size:
            raise ValueError(f"tensor_parallel_size is {size}, this machine has {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE)


def _follow(index: int, port: int, model: str, options: dict) -> None:
    """Makes the leader's calls until it says that there are no more. What fails here fails there, too."""
    _join(dist.TCPStore("127.0.0.1", port), index + 1, options["tensor_parallel_size"])
    with suppress(ValueError, OSError):  # the leader refuses the same, and says so
        llm, call = LLM(model, **options), [None]
        while True:
            dist.broadcast_object_list(call, src=0)
            if not call[0]:
                break
            name, args, kwargs = call[0]
            with suppress(Exception):
                getattr(llm, name)(*args, **kwargs)
    dist.destroy_process_group()


class LeadingLLM(LLM):
    def __init__(self, model: str, **options):
        size = options["tensor_parallel_size"]
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # lives as long as all
        arguments = (self._store.port, model, options)
        self._followers = multiprocessing.spawn(_follow, arguments, size - 1, join=False, daemon=True)
        _join(self._store, 0, size)
        try:
            super().__init__(model, **options)
        except BaseException:
            dist.destroy_process_group()
            raise
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the other processes."""
        atexit.unregister(self.close)
        dist.broadcast_object_list([None], src=0)
        while not self._followers.join():
            pass
        dist.destroy_process_group()


def _led(name: str):
    def call(self, *args, **kwargs):
        dist.broadcast_object_list([(name, args, kwargs)], src=0)
        return getattr(LLM, name)(self, *args, **kwargs)

    return call


for _name in ("add_request", "step", "abort", "fork"):
    setattr(LeadingLLM, _name, _led(_name))
