"""Who may know whom: scans includes and imports against the table below and fails on a breach."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
NOT_OPS = {"common", "arch", "cpu", "bindings", "vgpu"}
CUDA_HEADER = re.compile(r"cuda[\w/.]*|cooperative_groups[\w/.]*|mma\.h|nv/.*|sm_\w+")
TORCH_STABLE = re.compile(r"torch/csrc/stable/.+|torch/headeronly/.+|torch/csrc/inductor/aoti_torch/c/shim\.h")
# The two edges of the virtual GPU: Python, and the CUDA runtime whose place it takes.
VGPU_PYTHON = {"vgpu/python.cpp", "vgpu/python.h"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def cxx_files():
    return sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cuh", ".cpp", ".cu"))


def system_kind(name):
    """What an include outside csrc/ is: std, cuda, torch (its stable part), pybind11, or other."""
    if TORCH_STABLE.fullmatch(name):
        return "torch"
    if name.startswith(("pybind11", "Python.h")):
        return "pybind11"
    if CUDA_HEADER.fullmatch(name):
        return "cuda"
    standard = re.fullmatch(r"[a-z_0-9]+|(std\w+|math|sys/\w+|\wmmintrin|arm_neon|unistd|dlfcn|signal)\.h", name)
    return "std" if standard else "other"


def targets(path):
    """(include, kind or the path inside csrc/) of every include of a file."""
    for quote, name in INCLUDE.findall(path.read_text()):
        inside = [c for c in (CSRC / name, path.parent / name) if c.is_file()]
        if inside:
            yield name, inside[0].resolve().relative_to(CSRC)
        elif quote == '"' and name == "config.h":
            yield name, "std"  # written by setup.py: plain strings
        else:
            yield name, system_kind(name)


def is_op(part):
    return part not in NOT_OPS


def allowed(source, target):
    """Whether csrc/<source> may include `target`: a kind, or a path inside csrc/."""
    part, name = source.parts[0], source.name
    if source.as_posix() in VGPU_PYTHON and target == "pybind11":
        return True
    if source.as_posix().startswith("vgpu/runtime/") and target == "cuda":
        return True
    if isinstance(target, str):
        kinds = {
            "common": {"std", "cuda"},
            "arch": {"std", "cuda"},
            "cpu": {"std"},
            "vgpu": {"std"},
            "bindings": {"std", "torch", "cuda"} if name != "module.cpp" else {"std", "pybind11"},
        }
        return target in kinds.get(part, {"std", "cuda"})
    to = target.parts[0]
    if part in ("common", "arch"):
        return to in ("common", "arch")
    if part == "cpu":
        return to in ("common", "cpu") or (is_op(to) and target.name == "params.h")
    if part == "vgpu":
        return to == "vgpu"
    if part == "bindings":
        if is_op(to):
            return target.name in ("params.h", "launcher.h")
        return to in ("common", "bindings", "vgpu") or target.as_posix() == "cpu/kernels.h"
    if source.as_posix() == "paged_attention/dispatch.cpp" and is_op(to):
        return target.name == "launcher.h"  # one op, two kernels
    host_side = name.startswith(("launcher", "dispatch"))
    return to in (("common", part) if host_side else ("common", "arch", part))


@pytest.mark.parametrize("path", cxx_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_includes(path):
    source = path.relative_to(CSRC)
    breaches = [name for name, target in targets(path) if not allowed(source, target)]
    assert not breaches, f"csrc/{source} may not include {breaches}"


def python_files(folder):
    return sorted(p for p in (ROOT / folder).rglob("*.py")) if (ROOT / folder).exists() else []


def imports(path, top_level_only=False):
    """The absolute names of the modules a Python file imports."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*base, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def matches(name, *modules):
    return any(name == m or name.startswith(m + ".") for m in modules)


PYTHON_RULES = {
    "pagedkern": ("engine_min", "tests", "bench"),
    "triton_kernels": ("pagedkern._C", "engine_min", "tests", "bench"),
    "engine_min": ("pagedkern._C", "pagedkern.reference", "pagedkern.testing", "triton", "tests", "bench"),
}


@pytest.mark.parametrize("folder", PYTHON_RULES)
def test_imports(folder):
    breaches = [
        (str(path.relative_to(ROOT)), name)
        for path in python_files(folder)
        for name in imports(path)
        if matches(name, *PYTHON_RULES[folder])
    ]
    assert not breaches


def test_pagedkern_does_not_import_triton_at_import():
    breaches = [
        str(path.relative_to(ROOT))
        for path in python_files("pagedkern")
        if any(matches(name, "triton") for name in imports(path, top_level_only=True))
    ]
    assert not breaches


def test_triton_kernels_import_torch_and_triton_alone():
    breaches = [
        (path.name, name)
        for path in python_files("triton_kernels")
        for name in imports(path)
        if not matches(name, "torch", "triton", "triton_kernels") and name.split(".")[0] not in sys.stdlib_module_names
    ]
    assert python_files("triton_kernels") and not breaches


# attention.py is where the engine meets the ops.
MEETING_POINTS = {"attention.py"}
HELPERS = ("pagedkern.kv_layout", "pagedkern.quantized")


def test_engine_meets_the_ops_in_one_file():
    breaches = []
    for path in python_files("engine_min"):
        if path.name in MEETING_POINTS:
            continue
        if re.search(r"\bops\.pagedkern", path.read_text()):
            breaches.append((path.name, "torch.ops.pagedkern"))
        names = [n for n in imports(path) if matches(n, "pagedkern")]
        breaches += [(path.name, n) for n in names if n != "pagedkern" and not matches(n, *HELPERS)]
    assert not breaches


def test_inline_ptx_lives_in_arch():
    breaches = [
        str(p.relative_to(ROOT))
        for p in cxx_files()
        if p.relative_to(CSRC).parts[0] not in ("arch", "cpu", "vgpu")
        and re.search(r"\basm\s*(volatile)?\s*\(", p.read_text())
    ]
    assert not breaches


def test_the_scan_sees_a_breach():
    assert not allowed(Path("cpu/block_copy.cpp"), "torch")
    assert not allowed(Path("smoke/kernel.cu"), Path("gather/params.h"))
    assert not allowed(Path("bindings/smoke.cpp"), Path("smoke/kernel.cuh"))
    assert not allowed(Path("vgpu/lexer.cpp"), Path("block_copy/params.h"))
    assert system_kind("torch/csrc/autograd/function.h") == "other" == system_kind("ATen/ATen.h")
    assert matches("triton.language", "triton") and not matches("tritonish", "triton")
