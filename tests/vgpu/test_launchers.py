"""The launchers' own arithmetic, beyond what calls of the ops on CPU tensors reach."""

import ctypes
import pathlib

import numpy as np
import pytest
from test_runtime import FLAGS, NVCC, build

from pagedkern import vgpu

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ["block_copy/instantiations/copy_blocks.cu", "block_copy/copy_rows.cu"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not pathlib.Path(NVCC).exists():
        pytest.skip("nvcc is not installed")
    folder = tmp_path_factory.mktemp("launchers")
    whole = folder / "launchers.cu"
    files = [pathlib.Path(__file__).with_name("launcher_host.cu"), *(ROOT / "csrc" / name for name in SOURCES)]
    whole.write_text("".join(f'#include "{path}"\n' for path in files))
    loaded = build(whole, folder, *FLAGS, f"-I{ROOT / 'csrc'}")
    loaded.copy_many.restype = loaded.copy_rows.restype = ctypes.c_char_p
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


# destination, source, their pitches, bytes, rows
PLAIN = [(0, 512, 0, 0, 100, 1), (100, 0, 0, 0, 28, 1), (300, 700, 0, 0, 1, 1)]
PITCHED = [(0, 0, 64, 32, 32, 5), (400, 512, 32, 64, 32, 4)]
REPEATED = [(0, 96, 32, 0, 32, 6)]  # one row of the source to several: no pitch says that


@pytest.mark.parametrize("batched", [0, 1])
@pytest.mark.parametrize("own_stream", [0, 1])
@pytest.mark.parametrize("copies", [PLAIN[:1], PLAIN, PITCHED, REPEATED, PLAIN[1:] + PITCHED[1:]])
def test_rows_with_and_without_the_batched_copy(library, copies, own_stream, batched):
    rng = np.random.default_rng(0)
    source, got = rng.integers(0, 256, (2, 1024), dtype=np.uint8)
    expected = got.copy()
    for to, start, to_pitch, from_pitch, size, rows in copies:
        for row in range(rows):
            first = start + row * from_pitch
            expected[to + row * to_pitch : to + row * to_pitch + size] = source[first : first + size]
    table = np.array(copies, dtype=np.int64)
    sides = [ctypes.c_void_p(a.ctypes.data) for a in (source, got, table)]
    message = library.copy_rows(sides[0], 1024, sides[1], 1024, sides[2], len(copies), own_stream, batched)
    assert message is None
    np.testing.assert_array_equal(got, expected)


def test_the_batched_copy_is_as_strict_as_the_driver(library):
    source, got = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    sides = [ctypes.c_void_p(a.ctypes.data) for a in (got, source)]
    assert library.copy_batch(*sides, 64, 0) == 1 and not got.any()  # the legacy default stream
    assert library.copy_batch(*sides, 0, 1) == 101  # and the index of the copy that is wrong
    assert library.copy_batch(*sides, 64, 1) == 0
    np.testing.assert_array_equal(got, source)
