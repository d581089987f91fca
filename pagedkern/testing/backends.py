"""Which backends there are. A new one is one line here; every test runs on all of them."""

import os
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec

import torch

# The harness may run on one thread (tests do: its tensors are small); the op under test gets them all.
ALL_THREADS = torch.get_num_threads()


def hopper() -> bool:
    """Whether there is a GPU that the CUDA kernels are built for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@dataclass(frozen=True)
class Backend:
    name: str
    namespace: str  # torch.ops.<namespace>
    device: str
    checks_values: bool  # raises on slots, pairs and ids out of range without check mode
    max_work: float = float("inf")  # the largest case (in multiply-adds or elements) worth running on a slow backend
    ops: frozenset[str] | None = None  # those it has; None: all of them
    float32: bool = True  # q, k, v and out may be float32
    order: tuple[int, str] | None = None  # of the virtual GPU: seed and completion of asynchronous operations
    triton: bool = False
    sample: int = 1  # one test in so many is run, unless all are asked for

    def load(self) -> None:
        """Registers its ops, where importing pagedkern did not."""
        if self.triton:
            import pagedkern.triton_kernels  # noqa: F401
        elif self.order is not None:
            from pagedkern import vgpu

            vgpu.load_ops()

    def has(self, names: Iterable[str]) -> bool:
        return self.ops is None or self.ops.issuperset(names)

    def takes(self, case) -> bool:
        """Whether it has the case's op, for its dtype and size. Movers take a cache of any dtype."""
        computes = case.op_name not in ("copy_blocks", "swap_blocks")
        dtype_fits = self.float32 or not computes or case.dtype != torch.float32
        return self.has([case.op_name]) and dtype_fits and case.work <= self.max_work

    def session(self):
        """On the virtual GPU: every launch in this order, with all checks on."""
        if self.order is None:
            return nullcontext()
        from pagedkern import vgpu

        stack = ExitStack()
        stack.enter_context(vgpu.session(seed=self.order[0], async_completion=self.order[1], checks="all"))
        if self.triton:
            from pagedkern.testing import triton_vgpu

            stack.enter_context(triton_vgpu.on_vgpu())
        return stack

    def op(self, name: str, threads: int = ALL_THREADS) -> Callable:
        """torch.ops.<namespace>.<name> on that many threads; a backend that is not built fails here, by name."""
        self.load()
        if not hasattr(getattr(torch.ops, self.namespace), name):
            raise RuntimeError(
                f"backend {self.name}: torch.ops.{self.namespace}.{name} is not registered: build it first"
            )
        function = getattr(getattr(torch.ops, self.namespace), name)
        if self.device != "cpu":
            from pagedkern.testing.mirror import on_device

            # swap_blocks reads its mapping on the host; copy_blocks gets it on the device, where the kernel reads it.
            function = on_device(function, self.device, stays=("block_mapping",) if name == "swap_blocks" else ())

        def call(*args, **kwargs):
            harness_threads = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                with self.session():
                    return function(*args, **kwargs)
            finally:
                torch.set_num_threads(harness_threads)

        return call

    def samples(self, test: str) -> bool:
        """Whether the test is among those that are run where not all are: always the same ones."""
        return zlib.crc32(f"{self.name} {test}".encode()) % self.sample == 0

    @property
    def hardware(self) -> str | None:
        """The hardware that is missing here, or None."""
        return "a Hopper GPU" if self.device == "cuda" and not hopper() else None


# Those with a CUDA kernel (swap_blocks needs none), on the virtual GPU and on a real one.
VGPU_OPS = frozenset(
    {
        "reshape_and_cache", "reshape_and_cache_dynamic", "rope_reshape_and_cache", "paged_attention",
        "merge_attention_states", "gather_cache", "copy_blocks", "swap_blocks",
    }
)  # fmt: skip


def _vgpu(name: str, seed: int, async_completion: str) -> Backend:
    return Backend(name, "pagedkern_vgpu", "cpu", False, ops=VGPU_OPS, float32=False, order=(seed, async_completion))


TRITON_OPS = frozenset(
    {
        "reshape_and_cache", "reshape_and_cache_dynamic", "rope_reshape_and_cache", "merge_attention_states",
        "gather_cache", "copy_blocks", "swap_blocks", "paged_attention", "paged_attention_workspace_size",
    }
)  # fmt: skip


def _triton(name: str, order: tuple[int, str] | None, max_work: float, sample: int) -> Backend:
    return Backend(
        name, "pagedkern_triton", "cpu", False, max_work, TRITON_OPS, False, order, triton=True, sample=sample
    )


# Triton decides at import whether its kernels are interpreted: such a process has this backend alone.
INTERPRET = _triton("triton_interpret", None, 1e5, 50)
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_VGPU = [
    _triton("triton_vgpu", (0, "late"), 2e6, 40),
    _triton("triton_vgpu_early", (1, "early"), 3e5, 120),
    _triton("triton_vgpu_random", (2, "random"), 3e5, 120),
]
LIBRARY_BACKENDS = [
    Backend("cpu", "pagedkern", "cpu", checks_values=True),
    _vgpu("vgpu", 0, "late"),
    _vgpu("vgpu_early", 1, "early"),
    _vgpu("vgpu_random", 2, "random"),
    Backend("cuda", "pagedkern", "cuda", checks_values=False, ops=VGPU_OPS, float32=False),
]
BACKENDS = [INTERPRET] if INTERPRETING else LIBRARY_BACKENDS + (TRITON_VGPU if find_spec("triton") else [])
# The judge itself as a backend: it must pass what it judges.
REFERENCE = Backend("reference", "pagedkern_reference", "cpu", checks_values=True)


def by_name(name: str) -> Backend:
    return {backend.name: backend for backend in [*LIBRARY_BACKENDS, *BACKENDS, INTERPRET, REFERENCE]}[name]
