"""What this build holds: `pagedkern.build_info()`."""

import ctypes
from pathlib import Path

import torch

OP_LIBRARY = Path(__file__).with_name("libpagedkern_ops.so")


class BuildInfo(dict):
    """A plain dict that prints one fact a line."""

    def __str__(self):
        width = max(map(len, self))
        return "\n".join(f"{key:<{width}}  {value}" for key, value in self.items())


def build_info():
    """Versions and backends of this build.

    Keys: version, namespace, torch_target (the oldest torch the op library runs under), torch_built_with, torch (the
    one that runs now), compiler, cpu_simd_levels (built), cpu_simd (used on this machine), cuda (bool), cuda_missing
    (why not and how to get it, empty where it is in), nvcc, vgpu (bool: the virtual GPU), vgpu_ops (bool: the CUDA
    kernels compiled for it), vgpu_ops_missing (as cuda_missing).
    """
    from . import _C

    library = ctypes.CDLL(str(OP_LIBRARY))
    library.pagedkern_ops_info.restype = ctypes.c_char_p
    lines = library.pagedkern_ops_info().decode().splitlines()
    ops = dict(line.split("=", 1) for line in lines)
    module = _C.build_info()
    return BuildInfo(
        version=module["version"],
        namespace=ops["namespace"],
        torch_target="2.11",
        torch_built_with=ops["torch_built_with"],
        torch=torch.__version__,
        compiler=ops["compiler"],
        cpu_simd_levels=ops["simd_levels"].split(),
        cpu_simd=ops["simd_used"],
        cuda=ops["cuda"] == "1",
        cuda_missing=ops["cuda_missing"],
        nvcc=ops["nvcc_version"],
        vgpu=hasattr(_C, "vgpu"),
        vgpu_ops=not module["vgpu_ops_missing"],
        vgpu_ops_missing=module["vgpu_ops_missing"],
    )
