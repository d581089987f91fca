"""Which op namespace runs the ops where: `getattr(torch.ops, pagedkern.load_ops("vgpu"))`."""

from importlib import import_module

from . import _library

BACKENDS = ("cpu", "cuda", "triton", "vgpu", "reference")


def load_ops(backend: str) -> str:
    """Registers a backend's ops where importing pagedkern did not; their namespace under `torch.ops`.

    cpu and cuda share one, whose tensors decide; vgpu runs the CUDA kernels on CPU tensors; reference is the slow judge
    in float64.
    """
    if backend in ("cpu", "cuda"):
        return _library.NAMESPACE
    if backend == "vgpu":
        return import_module("pagedkern.vgpu").load_ops()
    if backend == "triton":
        return import_module("pagedkern.triton_kernels").NAMESPACE
    if backend == "reference":
        return import_module("pagedkern.reference").NAMESPACE
    raise ValueError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
