"""Tensors that end, or begin, where unmapped memory does: one byte read too far is a segmentation fault."""

import ctypes
import mmap

import torch

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PROT_NONE, PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS = 0, 1, 2, 2, 0x20


def _mapped(nbytes: int, at_end: bool) -> torch.Tensor:
    """uint8 [nbytes] between two unmapped pages, against the second one or the first. Never freed."""
    inner = -(-max(nbytes, 1) // PAGE) * PAGE
    address = _libc.mmap(None, inner + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    if _libc.mprotect(address + PAGE, inner, PROT_READ | PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")
    start = address + PAGE + (inner - nbytes if at_end else 0)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(start), dtype=torch.uint8)


def between_guards(tensor: torch.Tensor | None, at_end: bool) -> torch.Tensor | None:
    """A copy with the same strides whose first and last elements are the ends of its memory."""
    if tensor is None or tensor.numel() == 0:
        return tensor
    size = tensor.element_size()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    source = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * size
    memory = _mapped(extent * size, at_end)
    memory.copy_(source[start : start + extent * size])
    carrier = torch.uint8 if size == 1 else tensor.dtype
    return memory.view(carrier).as_strided(tensor.shape, tensor.stride()).view(tensor.dtype)
