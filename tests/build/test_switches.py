"""The build's switches and what it says when something is missing."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkern

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup(monkeypatch):
    for name in ("PAGEDKERN_CUDA", "PAGEDKERN_NAMESPACE", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return runpy.run_path(str(ROOT / "setup.py"), run_name="read_by_a_test")


def toolchain(setup, **changes):
    """A Toolchain as it is on a machine where these functions answer differently."""
    setup["Toolchain"].__init__.__globals__.update(changes)
    return setup["Toolchain"]()


def without_nvcc():
    return None


def cpu_torch(path):
    return {"__version__": "2.14.1+cpu", "cuda": None}


class CpuTorch:
    run_path = staticmethod(cpu_torch)


def test_everything_is_found_here(setup):
    tools = toolchain(setup)
    assert tools.cuda_missing == ""
    assert tools.nvcc_version.startswith("13.")


def test_off(setup, monkeypatch):
    monkeypatch.setenv("PAGEDKERN_CUDA", "0")
    assert "PAGEDKERN_CUDA=0" in toolchain(setup).cuda_missing


@pytest.mark.parametrize("value", ["yes", "2", "on"])
def test_a_switch_is_0_or_1(setup, monkeypatch, value):
    monkeypatch.setenv("PAGEDKERN_CUDA", value)
    with pytest.raises(SystemExit, match=f"PAGEDKERN_CUDA='{value}': expected 0 or 1"):
        toolchain(setup)


def test_without_nvcc_it_says_how_to_get_it(setup, monkeypatch):
    assert "pip install nvidia-cuda-nvcc" in toolchain(setup, _find_cuda_home=without_nvcc).cuda_missing
    monkeypatch.setenv("PAGEDKERN_CUDA", "1")
    with pytest.raises(SystemExit, match="PAGEDKERN_CUDA=1, but there is no nvcc"):
        toolchain(setup)


def test_beside_a_cpu_torch_cuda_is_built_on_demand_only(setup, monkeypatch):
    assert "install a CUDA build of torch" in toolchain(setup, runpy=CpuTorch).cuda_missing
    monkeypatch.setenv("PAGEDKERN_CUDA", "1")
    assert toolchain(setup).cuda_missing == ""


def test_without_a_compiler_it_says_so(setup, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(SystemExit, match="no C.. compiler 'no-such-compiler'.*apt install g"):
        toolchain(setup)


def test_namespace_reaches_the_bindings(setup, monkeypatch):
    monkeypatch.setenv("PAGEDKERN_NAMESPACE", "pagedkern_abc123")
    assert "-DPAGEDKERN_NAMESPACE=pagedkern_abc123" in "\n".join(setup["NinjaBuild"]("0").lines)


def in_a_new_process(code, **env):
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def simd_level_with(value):
    code = "import pagedkern; print(pagedkern.build_info()['cpu_simd'])"
    return in_a_new_process(code, PAGEDKERN_CPU_SIMD=value)


@pytest.fixture(scope="module")
def best_level():
    return simd_level_with("")


@pytest.mark.parametrize("level", pagedkern.build_info()["cpu_simd_levels"])
def test_simd_level_can_be_lowered(level, best_level):
    levels = pagedkern.build_info()["cpu_simd_levels"]
    assert levels.index(simd_level_with(level)) == min(levels.index(level), levels.index(best_level))


def test_build_info_prints_a_fact_a_line():
    info = pagedkern.build_info()
    assert isinstance(info, dict)
    assert info["version"] and info["torch_target"] == "2.11" and info["cuda"] == (info["cuda_missing"] == "")
    assert info["vgpu"] and info["vgpu_ops"] == (info["vgpu_ops_missing"] == "")
    lines = str(info).splitlines()
    assert len(lines) == len(info)
    assert all(line.startswith(key) for line, key in zip(lines, info, strict=True))
