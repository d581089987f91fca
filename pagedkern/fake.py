"""Fake (meta) implementations, so that torch.compile and torch.export trace through the ops."""

import torch

from ._library import NAMESPACE

# Every op that returns nothing, and the tensor whose device the others must share; a block_mapping may be on the CPU as
# well. Their fakes have nothing to compute: the schema's mutation marks say all. `paged_attention_workspace_size` takes
# numbers only and runs as it is.
_DEVICE_OF = {
    "reshape_and_cache": "key_cache",
    "reshape_and_cache_dynamic": "key_cache",
    "rope_reshape_and_cache": "key_cache",
    "paged_attention": "query",
    "merge_attention_states": "out",
    "gather_cache": "key_cache",
    "copy_blocks": "key_caches[0]",
    "swap_blocks": None,
}


def _tensors(names, args):
    for name, value in zip(names, args, strict=False):
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list):
            yield from ((f"{name}[{i}]", tensor) for i, tensor in enumerate(value))


def _make_fake(name, names, reference):
    def fake(*args):
        given = dict(_tensors(names, args))
        if reference not in given:
            return
        device = given[reference].device
        for argument, tensor in given.items():
            if tensor.device == device or (argument == "block_mapping" and tensor.device.type == "cpu"):
                continue
            raise RuntimeError(
                f"{name}: {argument} must be on the device of {reference} ({device}), got {tensor.device}"
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
