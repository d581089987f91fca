"""setup.py's explicit source lists hold exactly the sources of the tree."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lists():
    return runpy.run_path(str(ROOT / "setup.py"), run_name="read_by_a_test")


def test_every_source_is_listed_once():
    setup = lists()
    listed = [Path(s) for s in setup["SOURCES"]]
    assert len(listed) == len(set(listed))
    in_tree = {p.relative_to(ROOT) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".cu")}
    assert set(listed) == in_tree


def test_lists_are_sorted():
    setup = lists()
    for name in ("BINDINGS", "CPU", "CPU_SIMD", "CUDA", "CUDA_DISPATCH", "VGPU", "VGPU_FAMILIES", "VGPU_RUNTIME"):
        assert setup[name] == sorted(setup[name]), name


def test_every_package_folder_is_installed():
    packages = set(lists()["PACKAGES"])
    for top in ("pagedkern", "engine_min", "triton_kernels"):
        for init in (ROOT / top).rglob("*.py"):
            folder = init.parent.relative_to(ROOT)
            name = ".".join(folder.parts)
            name = f"pagedkern.{name}" if top == "triton_kernels" else name
            assert name in packages, f"{folder} is not in the wheel"
