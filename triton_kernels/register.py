"""Registers the ops. Schemas, fakes and argument checks are those of the op library, reached through torch.ops."""

import functools

import torch

from .common import current_processors, device_of, require_device
from .copy_blocks import copy_blocks
from .gather_cache import gather_cache
from .merge_attention_states import merge_attention_states
from .paged_attention import paged_attention, workspace_size
from .reshape_and_cache import reshape_and_cache
from .reshape_and_cache_dynamic import reshape_and_cache_dynamic
from .rope_reshape_and_cache import rope_reshape_and_cache
from .swap_blocks import swap_blocks

KERNELS = (
    reshape_and_cache, reshape_and_cache_dynamic, rope_reshape_and_cache, merge_attention_states, gather_cache,
    copy_blocks, swap_blocks, paged_attention,
)  # fmt: skip
_ARGUMENTS_ALONE, _VALUES_TOO = 1, 2


def _base_namespace() -> str:
    """The op library's: `pagedkern`, unless its build was given another name."""
    found = [name.split("::")[0] for name in torch._C._dispatch_get_all_op_names() if name.endswith("::_checks_only")]
    if len(found) != 1:
        raise ImportError(
            f"pagedkern.triton_kernels needs one op library loaded, found {found}: import pagedkern first"
        )
    return found[0]


BASE = getattr(torch.ops, _base_namespace())
NAMESPACE = f"{_base_namespace()}_triton"


def _tensors(args: tuple) -> list[torch.Tensor]:
    opened = [t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return [t for t in opened if isinstance(t, torch.Tensor)]


def _on_host(args: tuple) -> tuple:
    """The arguments on the CPU, with their strides: what check mode looks at."""
    storages: dict[int, torch.Tensor] = {}

    def copy(value):
        if isinstance(value, (list, tuple)):
            return [copy(v) for v in value]
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in storages:
            flat = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            storages[storage.data_ptr()] = flat.cpu()
        host = storages[storage.data_ptr()].untyped_storage()
        return torch.empty(0, dtype=value.dtype).set_(host, value.storage_offset(), value.size(), value.stride())

    return tuple(copy(value) for value in args)


def _check(op, args: tuple, on_cpu: bool) -> None:
    """The op library's checks of these arguments: one RuntimeError before anything is launched."""
    switch = BASE._checks_only.default
    check_mode = switch(_VALUES_TOO if on_cpu else _ARGUMENTS_ALONE)
    try:
        op(*args)
        if check_mode and not on_cpu:
            switch(_VALUES_TOO)
            op(*_on_host(args))
    finally:
        switch(0)


def _checked(function):
    op = getattr(BASE, function.__name__).default

    @functools.wraps(function)
    def run(*args):
        tensors = _tensors(args)
        if not tensors:
            return
        place = next((t for t in tensors if t.device.type != "cpu"), tensors[0])
        _check(op, args, place.device.type == "cpu")
        require_device(function.__name__, place)
        with device_of(place):
            function(*args)

    return run


def paged_attention_workspace_size(
    num_tokens, num_heads, num_kv_heads, head_dim, num_seqs, max_seqlen_q, max_seqlen_k, num_splits=0
) -> int:
    """What these kernels need or the op library's, whichever is more: it is enough for either."""
    sizes = (num_tokens, num_heads, num_kv_heads, head_dim, num_seqs, max_seqlen_q, max_seqlen_k, num_splits)
    base = BASE.paged_attention_workspace_size.default(*sizes)
    return max(base, workspace_size(*sizes, current_processors()))


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for function in KERNELS:
        name = function.__name__
        op = getattr(BASE, name).default
        library.define(str(op._schema).split("::", 1)[1])
        library.impl(name, _checked(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", op, lib=library)
    name = "paged_attention_workspace_size"
    library.define(str(getattr(BASE, name).default._schema).split("::", 1)[1])
    library.impl(name, paged_attention_workspace_size, "CompositeExplicitAutograd")
    return library


LIBRARY = _register()
