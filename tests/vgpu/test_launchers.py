"""The launchers' own arithmetic, beyond what calls of the ops on CPU tensors reach."""

import ctypes
import pathlib

import numpy as np
import pytest
from test_runtime import FLAGS, NVCC, build

from pagedkern import vgpu

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ["block_copy/instantiations/copy_blocks.cu"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not pathlib.Path(NVCC).exists():
        pytest.skip("nvcc is not installed")
    folder = tmp_path_factory.mktemp("launchers")
    whole = folder / "launchers.cu"
    files = [pathlib.Path(__file__).with_name("launcher_host.cu"), *(ROOT / "csrc" / name for name in SOURCES)]
    whole.write_text("".join(f'#include "{path}"\n' for path in files))
    loaded = build(whole, folder, *FLAGS, f"-I{ROOT / 'csrc'}")
    loaded.copy_many.restype = ctypes.c_char_p
    return loaded


# A launch takes 128 pairs of a host mapping, and 384 layers.
@pytest.mark.parametrize("seed,mode", [(0, "late"), (1, "early"), (2, "random")])
@pytest.mark.parametrize(
    "layers,pairs,on_host,launches",
    [(1, 128, 1, 1), (2, 129, 1, 2), (3, 300, 1, 3), (384, 2, 1, 1), (385, 2, 1, 2), (800, 20, 0, 3), (65, 3, 0, 1)],
)
def test_copy_blocks_in_several_launches(library, layers, pairs, on_host, launches, seed, mode):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (2 * layers, 2 * pairs + 3, 8), dtype=np.uint8)
    order = rng.permutation(2 * pairs + 3)
    mapping = np.stack([order[:pairs], order[pairs : 2 * pairs]], 1)
    expected = data.copy()
    expected[:, mapping[:, 1]] = data[:, mapping[:, 0]]
    with vgpu.session(seed=seed, async_completion=mode) as session:
        sides = [ctypes.c_void_p(a.ctypes.data) for a in (data, mapping)]
        message = library.copy_many(sides[0], layers, data.shape[1], 8, sides[1], pairs, on_host)
    assert message is None
    np.testing.assert_array_equal(data, expected)
    assert len(session.reports) == launches
