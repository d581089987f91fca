"""One wheel, installed outside the source tree, under two releases of torch."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SMOKE = Path(__file__).with_name("wheel_smoke.py")
OTHER_TORCH = "2.13.0"


def run(*command, cwd, **env):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def build_wheel(folder, **env):
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), cwd=ROOT, **env)
    return next(folder.glob("*.whl"))


def unpacked(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def other_python():
    """The interpreter of an environment with the other torch; made once, kept in build/."""
    folder = ROOT / "build" / f"venv-torch{OTHER_TORCH}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        venv.create(folder, clear=True, with_pip=True)
        run(python, "-m", "pip", "install", "-q", f"torch=={OTHER_TORCH}", "numpy", cwd=folder)
        ready.touch()
    return python


def test_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"pagedkern", "engine_min"}
    for library in ("ops", "vgpu", "ops_vgpu"):
        assert f"pagedkern/libpagedkern_{library}.so" in names
    assert "pagedkern/libpagedkern_vgpu_cudart.a" in names
    assert any(name.startswith("pagedkern/_C.") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    python = {p.relative_to(ROOT).as_posix() for top in ("pagedkern", "engine_min") for p in (ROOT / top).rglob("*.py")}
    python |= {f"pagedkern/triton_kernels/{p.name}" for p in (ROOT / "triton_kernels").glob("*.py")}
    assert {name for name in names if name.endswith(".py")} == python


def test_runs_outside_the_tree_under_the_torch_it_was_built_with(wheel, tmp_path):
    site = unpacked(wheel, tmp_path / "site")
    output = run(sys.executable, "-P", str(SMOKE), cwd=tmp_path, PYTHONPATH=str(site))
    assert f"ran under torch {torch.__version__}" in output
    assert str(site / "pagedkern") in output


def test_triton_kernels_live_inside_the_package(wheel, tmp_path):
    """A top-level triton_kernels would shadow Triton's own package of that name."""
    site = unpacked(wheel, tmp_path / "site")
    assert not (site / "triton_kernels").exists()
    code = (
        "import sys, pagedkern; assert 'triton' not in sys.modules; import pagedkern.triton_kernels as t, torch; "
        "print(t.__file__, torch.ops.pagedkern_triton.paged_attention.default._schema.name); "
        "from importlib.util import find_spec; assert find_spec('triton_kernels') is None"
    )
    output = run(sys.executable, "-P", "-c", code, cwd=tmp_path, PYTHONPATH=str(site))
    assert output.split() == [str(site / "pagedkern/triton_kernels/__init__.py"), "pagedkern_triton::paged_attention"]


def test_same_wheel_runs_under_another_torch(wheel, other_python, tmp_path):
    run(other_python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", str(wheel), cwd=tmp_path)
    output = run(other_python, "-P", str(SMOKE), cwd=tmp_path, PYTHONPATH="")
    assert f"ran under torch {OTHER_TORCH}" in output
    assert str(ROOT / "build" / other_python.parts[-3] / "lib") in output


def test_console_script(wheel, tmp_path):
    site = unpacked(wheel, tmp_path / "site")
    entry = next(site.glob("*.dist-info/entry_points.txt")).read_text()
    assert "pagedkern-engine = engine_min.cli:main" in entry
    call = "import sys; sys.argv = ['pagedkern-engine', '--help']; from engine_min.cli import main; main()"
    output = run(sys.executable, "-P", "-c", call, cwd=tmp_path, PYTHONPATH=str(site))
    assert "run" in output


def test_without_cuda_the_rest_is_built_and_says_so(tmp_path):
    site = unpacked(build_wheel(tmp_path, PAGEDKERN_CUDA="0"), tmp_path / "site")
    output = run(sys.executable, "-P", str(SMOKE), cwd=tmp_path, PYTHONPATH=str(site))
    assert "switched off by PAGEDKERN_CUDA=0" in output
