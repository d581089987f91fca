"""Paged attention, KV-cache writes and block movement as torch.ops.pagedkern.*.

Importing this loads the op library; `pagedkern.ops` documents each op.
"""

from . import fake, ops
from .backends import load_ops
from .build import build_info
from .check import check_mode

__all__ = ["build_info", "check_mode", "fake", "load_ops", "ops"]
