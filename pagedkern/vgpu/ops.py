"""torch.ops.pagedkern_vgpu.*: the CUDA kernels behind the ops, on CPU tensors, run by the virtual GPU."""

import functools
from pathlib import Path

from pagedkern import _C, _library, fake

NAMESPACE = f"{_library.NAMESPACE}_vgpu"
_PATH = Path(_library.__file__).with_name("libpagedkern_ops_vgpu.so")


@functools.cache
def load_ops() -> str:
    """Registers the ops, once; returns their namespace.

    `vgpu.session` governs their launches and holds the reports. A kernel's fault leaves the op as a RuntimeError with
    the text of a `KernelFault`. An op whose CUDA kernel is not written yet raises and says so.
    """
    missing = _C.build_info()["vgpu_ops_missing"]
    if missing:
        raise ImportError(f"pagedkern: this build has no kernels for the virtual GPU: {missing}")
    _library.add_library(_PATH)
    fake.register_fakes(NAMESPACE)
    return NAMESPACE
