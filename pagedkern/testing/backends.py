"""Which backends there are. A new one is one line here; every test runs on all of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# The harness may run on one thread (tests do: its tensors are small); the op under test gets them all.
ALL_THREADS = torch.get_num_threads()


@dataclass(frozen=True)
class Backend:
    name: str
    namespace: str  # torch.ops.<namespace>
    device: str
    checks_values: bool  # raises on slots, pairs and ids out of range without check mode
    max_work: float = float("inf")  # the largest case (in multiply-adds or elements) worth running on a slow backend

    def op(self, name: str, threads: int = ALL_THREADS) -> Callable:
        """torch.ops.<namespace>.<name> on that many threads; a backend that is not built fails here, by name."""
        if not hasattr(getattr(torch.ops, self.namespace), name):
            raise RuntimeError(
                f"backend {self.name}: torch.ops.{self.namespace}.{name} is not registered: build it first"
            )
        function = getattr(getattr(torch.ops, self.namespace), name)

        def call(*args, **kwargs):
            harness_threads = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                return function(*args, **kwargs)
            finally:
                torch.set_num_threads(harness_threads)

        return call

    @property
    def hardware(self) -> str | None:
        """The hardware that is missing here, or None."""
        return "a CUDA GPU" if self.device == "cuda" and not torch.cuda.is_available() else None


BACKENDS = [
    Backend("cpu", "pagedkern", "cpu", checks_values=True),
]
# The judge itself as a backend: it must pass what it judges.
REFERENCE = Backend("reference", "pagedkern_reference", "cpu", checks_values=True)


def by_name(name: str) -> Backend:
    return {backend.name: backend for backend in [*BACKENDS, REFERENCE]}[name]
