"""What nvcc makes of CUDA C++'s own pipelines, barriers, clusters and tensor copies, in every order."""

import pathlib
import shutil
import subprocess

import numpy as np
import pytest
from tensor_reference import ORDERS, aligned, order

from pagedkern import vgpu

NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if not pathlib.Path(NVCC).exists():
        pytest.skip("nvcc is not installed")
    out = tmp_path_factory.mktemp("ptx") / "async_kernels.ptx"
    source = pathlib.Path(__file__).with_name("async_kernels.cu")
    flags = ["-ptx", "-arch=sm_90a", "-std=c++17", "-lineinfo", "-diag-suppress", "20054"]
    subprocess.run([NVCC, *flags, str(source), "-o", str(out)], check=True)
    return vgpu.Module(out.read_text())


def numbers(tiles):
    out = aligned((tiles, 256), np.float32)
    out[...] = np.random.default_rng(0).standard_normal((tiles, 256))
    return out


@pytest.mark.parametrize("mode,seed", ORDERS)
@pytest.mark.parametrize("name", ["primitives_pipeline", "block_pipeline"])
def test_pipelines(kernels, name, mode, seed):
    x, y = numbers(7), aligned((7, 256), np.float32)
    with order(mode, seed) as session:
        kernels.launch(name, 1, 256, [x, y, 7])
    np.testing.assert_array_equal(y, 2 * x)
    assert session.reports[0]["unique_global_read_bytes"] == x.nbytes


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_bulk_roundtrip(kernels, mode, seed):
    x, y = numbers(7), aligned((7, 256), np.float32)
    with order(mode, seed) as session:
        kernels.launch("bulk_roundtrip", 2, 256, [x, y, 7])
    np.testing.assert_array_equal(y, 2 * x)
    assert session.reports[0]["bulk_bytes"] == 2 * x.nbytes


@pytest.mark.parametrize("seed", range(3))
def test_cluster_sum(kernels, seed):
    x, total = np.arange(8 * 64, dtype=np.int32), np.zeros(1, np.int32)
    with vgpu.session(seed=seed):
        kernels.launch("cluster_sum", 8, 64, [x, total], cluster=4)
    assert total[0] == x.sum()


@pytest.mark.parametrize("mode,seed", ORDERS)
def test_tensor_transpose(kernels, mode, seed):
    x, out = aligned((64, 96), np.float32), aligned((96, 64), np.float32)
    x[...] = np.random.default_rng(1).standard_normal(x.shape)
    with order(mode, seed):
        kernels.launch("tensor_transpose", (3, 2), 128, [vgpu.tensor_map(x, (32, 32)), out, 64])
    np.testing.assert_array_equal(out, x.T)
