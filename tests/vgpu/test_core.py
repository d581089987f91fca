"""Plain CUDA kernels on the virtual GPU against numpy, under several orders, and the first planted faults."""

import pathlib
import shutil
import subprocess

import numpy as np
import pytest

from pagedkern import vgpu

NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    if not pathlib.Path(NVCC).exists():
        pytest.skip("nvcc is not installed")
    out = tmp_path_factory.mktemp("ptx") / "kernels.ptx"
    source = pathlib.Path(__file__).with_name("kernels.cu")
    subprocess.run([NVCC, "-ptx", "-arch=sm_90a", "-lineinfo", str(source), "-o", str(out)], check=True)
    return vgpu.Module(out.read_text())


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("seed", SEEDS)
def test_saxpy(module, rng, seed):
    x, y = rng.standard_normal((2, 1000)).astype(np.float32)
    out = np.empty(1000, np.float32)
    with vgpu.session(seed=seed) as session:
        module.launch("saxpy", 8, 128, [x, y, vgpu.Uninitialized(out), 2.0, 1000])
    np.testing.assert_array_equal(out, (2.0 * x.astype(np.float64) + y).astype(np.float32))
    assert session.reports[0]["global_load_bytes"] == 8000
    assert session.reports[0]["global_store_bytes"] == 4000


@pytest.mark.parametrize("seed", SEEDS)
def test_row_sum(module, rng, seed):
    x = rng.integers(-50, 50, (16, 1000)).astype(np.float32)
    out = np.empty(16, np.float32)
    with vgpu.session(seed=seed):
        module.launch("row_sum", 16, 256, [x, out, 1000])
    np.testing.assert_array_equal(out, x.sum(1))


@pytest.mark.parametrize("seed", SEEDS)
def test_divergent_loop(module, rng, seed):
    x = rng.integers(1, 10000, 500).astype(np.int32)
    out = np.empty(500, np.int32)

    def steps(v):
        count = 0
        while v != 1:
            v = 3 * v + 1 if v & 1 else v // 2
            count += 1
        return count

    with vgpu.session(seed=seed):
        module.launch("collatz", 4, 128, [x, out, 500])
    assert out.tolist() == [steps(int(v)) for v in x]


@pytest.mark.parametrize("seed", SEEDS)
def test_histogram(module, rng, seed):
    x = rng.integers(0, 1 << 20, 5000).astype(np.int32)
    out = np.zeros(64, np.int32)
    with vgpu.session(seed=seed):
        module.launch("histogram", 6, 128, [x, out, 5000])
    np.testing.assert_array_equal(out, np.bincount(x & 63, minlength=64))


@pytest.mark.parametrize("seed", SEEDS)
def test_missing_barrier(module, seed):
    out = np.empty(128, np.float32)
    with vgpu.session(seed=seed):
        with pytest.raises(vgpu.KernelFault) as caught:
            module.launch("reverse_racy", 1, 128, [out])
        assert caught.value.kind in ("race", "uninitialized")
        assert caught.value.kernel == "reverse_racy"
        assert "kernels.cu:" in caught.value.source
        module.launch("reverse_right", 1, 128, [out])
    np.testing.assert_array_equal(out, np.arange(128)[::-1])


def test_out_of_bounds(module, rng):
    x, y = rng.standard_normal((2, 1000)).astype(np.float32)
    out = np.empty(999, np.float32)
    with pytest.raises(vgpu.KernelFault) as caught:
        module.launch("saxpy", 8, 128, [x, y, out, 2.0, 1000])
    assert (caught.value.kind, caught.value.block, caught.value.thread) == ("out_of_bounds", (7, 0, 0), (103, 0, 0))
    assert "st.global.f32" in caught.value.instruction


def test_unwritten_memory(module):
    out = np.empty(16, np.float32)
    with pytest.raises(vgpu.KernelFault, match="uninitialized"):
        module.launch("row_sum", 16, 256, [vgpu.Uninitialized(np.empty((16, 1000), np.float32)), out, 1000])


def test_endless_loop(module):
    x, out = np.zeros(128, np.int32), np.empty(128, np.int32)
    with vgpu.session(max_warp_instructions=100_000), pytest.raises(vgpu.KernelFault) as caught:
        module.launch("collatz", 1, 128, [x, out, 128])  # 0 never reaches 1
    assert caught.value.kind == "budget"


def test_refused_launches(module):
    out = np.empty(2048, np.float32)
    for change, message in (
        ({"block": 2048}, "1024 threads"),
        ({"shared_bytes": 300_000}, "shared memory"),
        ({"grid": 3, "cluster": 2}, "does not divide"),
    ):
        with pytest.raises(vgpu.LaunchError, match=message):
            module.launch("reverse_right", **({"grid": 1, "block": 128, "args": [out]} | change))


def test_unknown_text_is_listed():
    head = ".version 8.7\n.target sm_90a\n.address_size 64\n"
    body = ".visible .entry k()\n{\n.reg .b32 %r<4>;\nfrob.u32 %r1, %r2;\nadd.s31 %r1, %r2, %r3;\nret;\n}\n"
    with pytest.raises(vgpu.ParseError) as caught:
        vgpu.Module(head + body)
    assert "frob.u32" in str(caught.value)
    assert "add.s31" in str(caught.value)


def test_sessions_with_the_same_settings_are_two(module):
    out = np.empty(128, np.float32)
    with vgpu.session() as outer:
        with vgpu.session() as inner:
            pass
        module.launch("reverse_right", 1, 128, [out])
        assert (len(outer.reports), len(inner.reports)) == (1, 0)


@pytest.mark.parametrize("settings", [{"seed": -1}, {"seed": 1.5}, {"max_warp_instructions": 2**64}, {"threads": -1}])
def test_a_refused_session_leaves_no_trace(module, settings):
    ((name, value),) = settings.items()
    with (
        pytest.raises(ValueError, match=f"^{name}: got {value}, expected a whole number in "),
        vgpu.session(**settings),
    ):
        pass
    with vgpu.session() as session:
        module.launch("reverse_right", 1, 128, [np.empty(128, np.float32)])
    assert len(session.reports) == 1
