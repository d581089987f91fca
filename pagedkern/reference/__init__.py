"""The op contract in plain float64 PyTorch: slow, obviously right, the judge of every backend.

attention.paged_attention and merge_attention_states return float64 results; the cache ops work in place and byte for
byte. Importing this also registers all of them as torch.ops.pagedkern_reference.* with the contract's schemas.
"""

from pagedkern.reference.attention import live_range, merge_attention_states, paged_attention
from pagedkern.reference.cache import (
    copy_blocks,
    gather_cache,
    reshape_and_cache,
    reshape_and_cache_dynamic,
    rope_reshape_and_cache,
    swap_blocks,
)
from pagedkern.reference.fp8 import decode, decode_table, encode, fp8_max
from pagedkern.reference.schemas import LIBRARY, NAMESPACE

__all__ = [
    "LIBRARY",
    "NAMESPACE",
    "copy_blocks",
    "decode",
    "decode_table",
    "encode",
    "fp8_max",
    "gather_cache",
    "live_range",
    "merge_attention_states",
    "paged_attention",
    "reshape_and_cache",
    "reshape_and_cache_dynamic",
    "rope_reshape_and_cache",
    "swap_blocks",
]
