"""torch.ops.pagedkern_triton.* on CPU tensors: the kernels compiled by Triton for sm_90 and run by the virtual GPU."""

import contextlib

import torch

from pagedkern.vgpu.module import Module
from pagedkern.vgpu.triton import _NAMES, Compiled, _scratch, _triton

_compiled: dict[tuple, Compiled] = {}


def _kind(param, value):
    """The type of an argument as Triton's own launcher would find it; tuples are opened."""
    if param.is_constexpr:
        return "constexpr"
    if isinstance(value, tuple):
        return tuple(_kind(param, v) for v in value)
    if isinstance(value, torch.Tensor):
        return "*" + _NAMES[value.dtype]
    if not param.annotation_type:
        raise TypeError(f"argument {param.name} is {type(value).__name__}: annotate it with its width")
    return param.annotation_type


def compiled(kernel, args, options) -> Compiled:
    """The kernel for arguments of these kinds, compiled once."""
    signature = {param.name: _kind(param, value) for param, value in zip(kernel.params, args, strict=True)}
    constants = {p.name: value for p, value in zip(kernel.params, args, strict=True) if p.is_constexpr}
    key = (kernel, *signature.values(), *constants.values(), *sorted(options.items()))
    if key not in _compiled:
        source = _triton().source(kernel, signature, constants, {})
        result = _triton().compile(source, options=options)
        _compiled[key] = Compiled(result, Module(result.asm["ptx"]), signature)
    return _compiled[key]


def launch(kernel, grid, args, by_address, options) -> None:
    """Stands in for Triton's launcher; memory that is reached by address must be named, as on no real device."""
    program = compiled(kernel, args, options)
    meta = program.kernel.metadata
    values, names = [], []
    for (name, kind), value in zip(program.signature.items(), args, strict=True):
        if kind != "constexpr":
            opened = value if isinstance(value, tuple) else (value,)
            values += opened
            names += [name] * len(opened)
    grid = (*grid, 1, 1)[:3]
    scratch = [_scratch(size, grid[0] * grid[1] * grid[2]) for size in (meta.global_scratch_size,
                                                                       meta.profile_scratch_size)]  # fmt: skip
    program.module.launch(
        meta.name,
        grid,
        32 * meta.num_warps,
        values + scratch,
        shared_bytes=meta.shared,
        memory=by_address,
        names=names + ["scratch"] * 2,
    )


@contextlib.contextmanager
def on_vgpu():
    """In the block, torch.ops.pagedkern_triton.* run CPU tensors on the virtual GPU."""
    from pagedkern.triton_kernels import common

    with common.launcher(launch):
        yield
