"""The op library: found, loaded and asked for its name here, once."""

import ctypes
from pathlib import Path

import torch

_PATH = Path(__file__).with_name("libpagedkern_ops.so")
if not _PATH.exists():
    raise ImportError(
        f"pagedkern: the op library {_PATH} is not built. In a source tree run `make build` "
        "(or `python setup.py build_ext --inplace`); elsewhere install the package again with `pip install .`"
    )
try:
    torch.ops.load_library(str(_PATH))
except OSError as error:
    raise ImportError(
        f"pagedkern: {_PATH} does not load under torch {torch.__version__} (it needs torch >= 2.11): {error}"
    ) from error

# The library's few plain C functions.
LIBRARY = ctypes.CDLL(str(_PATH))
LIBRARY.pagedkern_ops_info.restype = ctypes.c_char_p

_SWITCHES = ("pagedkern_check_mode", "pagedkern_log")
_libraries = [LIBRARY]


def add_library(path: Path) -> None:
    """Loads another build of the bindings; the process-wide switches govern it too."""
    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    for name in _SWITCHES:
        getattr(library, name)(getattr(LIBRARY, name)(-1))
    _libraries.append(library)


def switch(name: str, value: int) -> int:
    """Sets a switch in every library, or only asks where the value is negative; what it was before."""
    return [getattr(library, name)(value) for library in _libraries][0]


# torch.ops.<NAMESPACE>: `pagedkern`, unless the build was given another name.
NAMESPACE = dict(line.split("=", 1) for line in LIBRARY.pagedkern_ops_info().decode().splitlines())["namespace"]
