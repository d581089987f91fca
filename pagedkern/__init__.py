"""Paged attention, KV-cache writes and block movement as torch.ops.pagedkern.*.

Importing this loads the op library; `pagedkern.ops` documents each op.
"""

from pathlib import Path

import torch

_LIBRARY = Path(__file__).with_name("libpagedkern_ops.so")
if not _LIBRARY.exists():
    raise ImportError(
        f"pagedkern: the op library {_LIBRARY} is not built. In a source tree run `make build` "
        "(or `python setup.py build_ext --inplace`); elsewhere install the package again with `pip install .`"
    )
try:
    torch.ops.load_library(str(_LIBRARY))
except OSError as error:
    raise ImportError(
        f"pagedkern: {_LIBRARY} does not load under torch {torch.__version__} (it needs torch >= 2.11): {error}"
    ) from error

from . import fake, ops  # noqa: E402
from .build import build_info  # noqa: E402
from .check import check_mode  # noqa: E402

__all__ = ["build_info", "check_mode", "fake", "ops"]
