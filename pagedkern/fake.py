"""Fake (meta) implementations, so that torch.compile and torch.export trace through the ops."""

import torch

from ._library import NAMESPACE

# Every op that returns nothing, and the argument whose device the others must share. Their fakes have nothing to
# compute: the schema's mutation marks say all. `paged_attention_workspace_size` takes numbers only and runs as it is.
_DEVICE_OF = {
    "reshape_and_cache": "key_cache",
    "reshape_and_cache_dynamic": "key_cache",
    "rope_reshape_and_cache": "key_cache",
    "paged_attention": "query",
    "merge_attention_states": "out",
    "gather_cache": "key_cache",
    "copy_blocks": None,
    "swap_blocks": None,
}


def _make_fake(name, names, reference):
    def fake(*args):
        given = dict(zip(names, args, strict=False))
        for argument, tensor in given.items() if reference is not None else ():
            if isinstance(tensor, torch.Tensor) and tensor.device != given[reference].device:
                raise RuntimeError(
                    f"{name}: {argument} must be on the device of {reference} ({given[reference].device}), "
                    f"got {tensor.device}"
                )

    return fake


def register_fakes(namespace):
    """Registers the fakes of one namespace (`pagedkern`, `pagedkern_triton`, `pagedkern_vgpu`)."""
    for name, reference in _DEVICE_OF.items():
        schema = getattr(getattr(torch.ops, namespace), name).default._schema
        fake = _make_fake(name, [argument.name for argument in schema.arguments], reference)
        torch.library.register_fake(f"{namespace}::{name}", fake)


register_fakes(NAMESPACE)
# The CPU's own ops return nothing either.
torch.library.register_fake(f"{NAMESPACE}_cpu::quantized_linears", lambda *_: None)
