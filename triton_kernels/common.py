"""What the kernels share: how they are declared, launched and specialised, and how a tile is addressed."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl


def kernel(function):
    """@triton.jit without Triton's own specialisation: only constexprs choose what is compiled, so that no batch size
    or pointer makes a running server compile again. Integers are annotated with their width."""
    runtime = [
        name for name, p in inspect.signature(function).parameters.items() if p.annotation is not tl.constexpr
    ]  # fmt: skip
    return triton.jit(do_not_specialize=runtime)(function)


@triton.jit
def _probe():
    pass


# Whether this process started with TRITON_INTERPRET=1: Triton decides when a kernel is declared.
INTERPRETED = not isinstance(_probe, triton.runtime.JITFunction)

# Stands in for a device on CPU tensors: called as launcher(kernel, grid, args, by_address, options).
_launcher: Callable | None = None


@contextlib.contextmanager
def launcher(function: Callable):
    """Until the block ends, launches on CPU tensors go through `function(kernel, grid, args, by_address, options)`."""
    global _launcher
    former, _launcher = _launcher, function
    try:
        yield
    finally:
        _launcher = former


def require_device(op: str, tensor: torch.Tensor) -> None:
    """Raises where nothing can run a kernel on this tensor."""
    on_cpu = tensor.device.type == "cpu"
    if on_cpu != (INTERPRETED or _launcher is not None):
        expected = (
            "the CPU, since TRITON_INTERPRET is set" if INTERPRETED else "a GPU (the CPU under TRITON_INTERPRET=1)"
        )
        raise RuntimeError(f"{op}: tensors must be on {expected}, got {tensor.device}")


def launch(function, grid: tuple[int, ...], args: Sequence, by_address: Sequence = (), **options) -> None:
    """Launches on the current stream of the current device; options are num_warps, num_stages. by_address: the
    tensors among the arguments that are given as addresses."""
    if _launcher is not None:
        _launcher(function, grid, args, [t for t in by_address if t is not None], options)
    else:
        function[grid](*args, **options)


def device_of(tensor: torch.Tensor):
    """A context in which the tensor's device is the current one."""
    if tensor.device.type == "cpu":
        return contextlib.nullcontext()
    module = torch.get_device_module(tensor.device)
    if tensor.device.index == module.current_device():
        return contextlib.nullcontext()
    return module.device(tensor.device)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors or what the device calls them; an H200's where there is none."""
    if device.type == "cpu":
        return 132
    properties = torch.get_device_module(device).get_device_properties(device)
    for name in ("multi_processor_count", "gpu_subslice_count", "max_compute_units"):
        if hasattr(properties, name):
            return getattr(properties, name)
    return 64


def current_processors() -> int:
    """Of the device that a tensor without a place of its own would be on."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return num_processors(device or torch.device("cpu"))


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of it that a program may have; an H200's where there is no device."""
    if device.type == "cpu":
        return 227 * 1024
    properties = torch.get_device_module(device).get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 64 * 1024)


@functools.cache
def converts_fp8(device: torch.device) -> bool:
    """Whether there are instructions that take two e4m3 elements to float16: NVIDIA from sm_89 on."""
    if INTERPRETED:
        return False
    if device.type == "cpu":
        return True  # compiled for sm_90
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def vector_bytes(*tensors: torch.Tensor | None) -> int:
    """The widest aligned access, 16, 8 or 1 bytes, that every row of every tensor allows."""
    bits = 16
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
            for stride in tensor.stride()[:-1]:
                bits |= stride * tensor.element_size()
    lowest = bits & -bits
    return lowest if lowest >= 8 else 1


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """FP8 tensors as bytes: kernels convert them by integer arithmetic, the same on every device."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def address(tensor: torch.Tensor | None) -> int:
    """Of an optional tensor, 0 for None: kernels compiled once serve both."""
    return 0 if tensor is None else tensor.data_ptr()


def scale_args(scale: torch.Tensor | None) -> tuple[int, int, int, int]:
    """An FP8 scale as the kernels take it: address, stride of block, of token, of head. Per tensor and per head are
    strides of 0."""
    if scale is None:
        return 0, 0, 0, 0
    if scale.dim() == 3:
        return scale.data_ptr(), *scale.stride()
    return scale.data_ptr(), 0, 0, 1 if scale.numel() > 1 else 0


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


# head_dim rounded up to what a tile holds; few of them, since each is a compilation.
def padded_head_dim(head_dim: int) -> int:
    return max(64, next_power_of_2(head_dim))


INTERPRETING = tl.constexpr(INTERPRETED)


@triton.jit
def narrow(x, kind: tl.constexpr):
    """float32 to a 16-bit float, to nearest even; one that is narrow already stays as it is. The interpreter cuts
    bfloat16 off: there the bits are rounded first."""
    if INTERPRETING:
        if (kind == tl.bfloat16) & (x.dtype == tl.float32):
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(kind)


@triton.jit
def wide(x):
    """A 16-bit float as float32. The interpreter takes bfloat16's subnormals for 0: there the bits are moved."""
    if INTERPRETING:
        if x.dtype == tl.bfloat16:
            return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            return x.to(tl.float32)
    else:
        return x.to(tl.float32)


@triton.jit
def row_pointers(base, o_row, i_column, VECTOR: tl.constexpr):
    """Pointers [rows, columns]: element offsets o_row (int64), then columns; aligned to VECTOR bytes."""
    p_tile = base + o_row[:, None] + i_column[None, :]
    if VECTOR > 1:
        p_tile = tl.multiple_of(p_tile, (1, VECTOR))
    return p_tile


@triton.jit
def float32_at(address):
    """A pointer from an integer argument; the interpreter takes small ones for 32 bits wide."""
    return address.to(tl.int64).to(tl.pointer_type(tl.float32))


@triton.jit
def int32_at(address):
    return address.to(tl.int64).to(tl.pointer_type(tl.int32))
