"""Fake (meta) implementations, so that torch.compile and torch.export trace through the ops."""

import torch

# Every op that returns nothing: its fake has nothing to compute, the schema's mutation marks say all.
_MUTATING = (
    "reshape_and_cache",
    "reshape_and_cache_dynamic",
    "rope_reshape_and_cache",
    "paged_attention",
    "merge_attention_states",
    "gather_cache",
    "copy_blocks",
    "swap_blocks",
)


def _nothing(*args, **kwargs):
    return None


def register_fakes(namespace):
    """Registers the fakes of one namespace (`pagedkern`, `pagedkern_triton`, `pagedkern_vgpu`)."""
    for name in _MUTATING:
        torch.library.register_fake(f"{namespace}::{name}", _nothing)


register_fakes("pagedkern")
