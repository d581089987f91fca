"""Tensor maps for kernels that copy with TMA: what cuTensorMapEncodeTiled makes on a GPU."""

import numpy as np

from pagedkern.vgpu._core import core
from pagedkern.vgpu.module import TensorMap

# The driver's CUtensorMapDataType. Types without one of their own travel as bytes or integers of their width.
_TYPES = {
    "uint8": 0,
    "int8": 0,
    "bool": 0,
    "float8_e4m3fn": 0,
    "float8_e5m2": 0,
    "uint16": 1,
    "int16": 1,
    "uint32": 2,
    "int32": 3,
    "uint64": 4,
    "int64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float32_ftz": 10,
    "tfloat32": 11,
    "tfloat32_ftz": 12,
}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
INTERLEAVES = {0: 0, 16: 1, 32: 2}


def tensor_map(tensor, box, *, swizzle=0, nan_fill=False, element_strides=None, interleave=0, dtype=None) -> TensorMap:
    """The tensor map of a torch tensor or numpy array, with the checks the driver makes (ValueError).

    box: elements of the copied box per dimension, in the tensor's own order (innermost last).
    swizzle: 0, 32, 64 or 128 bytes. nan_fill: elements outside the tensor load as NaN instead of zero.
    element_strides: step per dimension, in the tensor's order. dtype: another name than the tensor's own.
    """
    is_torch = hasattr(tensor, "data_ptr")
    name = dtype or (str(tensor.dtype).removeprefix("torch.") if is_torch else np.dtype(tensor.dtype).name)
    if name not in _TYPES:
        raise ValueError(f"tensorDataType: {name} has no tensor map")
    strides = [s * tensor.element_size() for s in tensor.stride()] if is_torch else list(tensor.strides)
    size = tensor.element_size() if is_torch else tensor.itemsize
    if tensor.ndim == 0 or strides[-1] != size:
        raise ValueError("the innermost dimension must be contiguous")
    if swizzle not in SWIZZLES or interleave not in INTERLEAVES:
        raise ValueError(f"swizzle must be one of {sorted(SWIZZLES)}, interleave one of {sorted(INTERLEAVES)}")
    data = core.encode_tensor_map(
        _TYPES[name],
        tensor.data_ptr() if is_torch else tensor.__array_interface__["data"][0],
        list(tensor.shape)[::-1],
        strides[::-1][1:],
        list(box)[::-1],
        list(element_strides or [1] * tensor.ndim)[::-1],
        INTERLEAVES[interleave],
        SWIZZLES[swizzle],
        0,
        int(nan_fill),
    )
    return TensorMap(data, tensor)
