"""Triton kernels on the virtual GPU: compiled for sm_90 by Triton itself, launched on CPU tensors.

from pagedkern.vgpu.triton import launch
launch(kernel, (blocks,), x, y, n, BLOCK=1024, num_warps=4)
"""

import dataclasses
import functools
import types

import torch

from pagedkern.vgpu.module import Module, Uninitialized
from pagedkern.vgpu.report import Report
from pagedkern.vgpu.tensor_map import tensor_map

_SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}
_NAMES = {
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


@functools.cache
def _triton() -> types.SimpleNamespace:
    """What is used of Triton, imported when the first kernel is compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    return types.SimpleNamespace(
        compile=functools.partial(triton.compile, target=GPUTarget("cuda", 90, 32)),
        source=ASTSource,
        descriptor=TensorDescriptor,
    )


@dataclasses.dataclass
class Compiled:
    """A kernel for one kind of arguments: Triton's result and the parsed PTX."""

    kernel: object
    module: Module
    signature: dict[str, str]

    @property
    def ptx(self) -> str:
        """The PTX text."""
        return self.kernel.asm["ptx"]


def _is_aligned(value) -> bool:
    return value.data_ptr() % 16 == 0 if isinstance(value, torch.Tensor) else value % 16 == 0


def _type_of(value) -> str:
    if isinstance(value, _triton().descriptor):
        block = ",".join(str(b) for b in value.block_shape)
        return f"tensordesc<{_NAMES[value.base.dtype]}[{block}]>"
    if isinstance(value, torch.Tensor):
        return "*" + _NAMES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "constexpr" if value == 1 else "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a Triton kernel takes no {type(value).__name__}")


def _bind(fn, args, kwargs) -> tuple[dict, dict]:
    """(arguments by name, compile options)."""
    named = dict(zip(fn.arg_names, args, strict=False))
    options = {}
    for name, value in kwargs.items():
        (named if name in fn.arg_names else options)[name] = value
    missing = [n for n in fn.arg_names if n not in named]
    if missing:
        raise TypeError(f"{fn.__name__}: missing arguments {missing}")
    return {n: named[n] for n in fn.arg_names}, options


def compile_kernel(fn, *args, **kwargs) -> Compiled:
    """Compiles a @triton.jit function for these arguments, specialised as Triton's own launcher would."""
    named, options = _bind(fn, args, kwargs)
    constexprs = {p.name for p in fn.params if p.is_constexpr}
    signature, constants, attributes = {}, {}, {}
    for k, (name, value) in enumerate(named.items()):
        signature[name] = "constexpr" if name in constexprs or value is None else _type_of(value)
        if signature[name] == "constexpr":
            constants[name] = value
        elif signature[name][0] in "*i" and signature[name] != "i1" and _is_aligned(value):
            attributes[(k,)] = [["tt.divisibility", 16]]
    source = _triton().source(fn, signature, constants, attributes)
    kernel = _triton().compile(source, options=options)
    return Compiled(kernel, Module(kernel.asm["ptx"]), signature)


def _describe(descriptor, meta) -> list:
    """The parameters a host-side descriptor becomes: the map, the shape, the strides."""
    map_ = tensor_map(
        torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides),
        meta["block_size"],
        swizzle=_SWIZZLE_BYTES[meta["swizzle"]],
        nan_fill=descriptor.padding == "nan",
    )
    return [map_, *(int(n) for n in descriptor.shape), *(int(s) for s in descriptor.strides)]


def _scratch(size: int, blocks: int):
    if not size:
        return 0
    room = torch.empty(size * blocks + 128, dtype=torch.uint8)
    return Uninitialized(room[-room.data_ptr() % 128 :])


def launch(fn, grid, *args, **kwargs) -> Report:
    """Compiles a @triton.jit function for these arguments and runs it over `grid`.

    Keyword arguments that the kernel does not take are compile options (num_warps, num_stages, num_ctas, ...).
    """
    compiled = compile_kernel(fn, *args, **kwargs)
    return launch_compiled(compiled, grid, *_bind(fn, args, kwargs)[0].values())


def launch_compiled(compiled: Compiled, grid, *args) -> Report:
    """Runs a compiled kernel again with arguments of the same kinds, constexprs included."""
    meta = compiled.kernel.metadata
    descriptors = list(getattr(meta, "tensordesc_meta", None) or [])
    values = []
    for kind, value in zip(compiled.signature.values(), args, strict=True):
        if kind == "constexpr":
            continue
        values += _describe(value, descriptors.pop(0)) if isinstance(value, _triton().descriptor) else [value]
    grid = tuple(grid) + (1,) * (3 - len(grid))
    ctas = meta.num_ctas
    blocks = grid[0] * grid[1] * grid[2] * ctas
    values += [_scratch(meta.global_scratch_size, blocks), _scratch(meta.profile_scratch_size, blocks)]
    info = compiled.module.info(meta.name)
    return compiled.module.launch(
        meta.name,
        (grid[0] * ctas, grid[1], grid[2]),
        info["reqntid"][0] or 32 * meta.num_warps,
        values,
        shared_bytes=meta.shared,
        cluster=(ctas, 1, 1),
    )
