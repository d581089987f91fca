"""What the documents name exists, and what they show runs."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pagedkern  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
DOCS = ["README.md", "CONTRIBUTING.md", "csrc/README.md", "engine_min/README.md"]
SWITCH = re.compile(r"\bPAGEDKERN_[A-Z_]+\b")
SOURCE_FOLDERS = ("csrc", "pagedkern", "engine_min", "triton_kernels")
# `<op>/...` and a pattern stand for many; what the build writes is not in the tree.
BUILT = {"libpagedkern_ops.so", "libpagedkern_vgpu.so", "libpagedkern_ops_vgpu.so", ".venv"}


def code_spans(text):
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"`([^`]+)`", text)


def is_path(span):
    return bool(re.fullmatch(r"[\w./-]*(/|\.(md|py|h|cpp|cu|cuh|toml|txt|yaml|so))[\w./-]*", span)) and "<" not in span


@pytest.mark.parametrize("doc", DOCS)
def test_paths_exist(doc):
    text = (ROOT / doc).read_text()
    spans = [s for s in code_spans(text) if is_path(s) and s not in BUILT and not s.startswith("/")]
    spans += [s for s in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in s]
    missing = [s for s in spans if not (ROOT / s).exists() and not (ROOT / doc).parent.joinpath(s).exists()]
    # `params.h` and `launcher.h` are spoken of as kinds of files.
    missing = [s for s in missing if "/" in s or not any((ROOT / "csrc").rglob(s))]
    assert not missing


@pytest.mark.parametrize("doc", DOCS)
def test_make_targets_exist(doc):
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", (ROOT / doc).read_text(), re.MULTILINE)
    missing = [t for pair in named for t in pair if t and not re.search(rf"^{t}:", makefile, re.MULTILINE)]
    assert not missing


def resolves(dotted):
    """Whether pagedkern.x.y names a module or an attribute of one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return all((value := getattr(value, p, None)) is not None for p in parts[cut:])
    return False


@pytest.mark.parametrize("doc", DOCS)
def test_python_names_exist(doc):
    names = re.findall(
        r"(?<![\w./])(?:pagedkern|engine_min)(?:\.[a-z_]\w*)+", " ".join(code_spans((ROOT / doc).read_text()))
    )
    names = [n for n in names if not n.endswith((".x", ".py"))]
    assert [n for n in names if not resolves(n)] == []


def test_every_op_named_in_the_readme_is_registered_and_the_other_way_round():
    row = re.search(r"^\| ops \|(.*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE).group(1)
    named = set(re.findall(r"`(\w+)`", row))
    schemas = torch._C._jit_get_all_schemas()
    registered = {s.name.split("::")[1] for s in schemas if s.name.startswith("pagedkern::")}
    public = {n for n in registered if not n.startswith("_") and not n.endswith("_workspace_size")}
    assert named == public


def test_the_engines_map_is_complete_and_its_size_true():
    text = (ROOT / "engine_min/README.md").read_text()
    files = {path.name: path for path in (ROOT / "engine_min").glob("*.py") if path.name != "__init__.py"}
    assert set(re.findall(r"`(\w+\.py)`", text)) == set(files)
    named = int(re.search(r"([\d,]+) lines", text).group(1).replace(",", ""))
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "engine_min").glob("*.py"))
    assert abs(named - lines) <= 50, lines


def environment_switches():
    """PAGEDKERN_ names that setup.py, the Makefile or the sources read from the environment."""
    read = re.compile(r"(?:environ|getenv|env|_switch|set_in_environment)\w*[.(\[ ]*(?:get\()?[\"'](PAGEDKERN_[A-Z_]+)")
    files = [ROOT / "setup.py"]
    for folder in SOURCE_FOLDERS:
        files += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".h", ".cpp", ".cu", ".cuh")]
    found = {name for path in files for name in read.findall(path.read_text())}
    return found | set(re.findall(r"\$\((PAGEDKERN_[A-Z_]+)\)", (ROOT / "Makefile").read_text()))


def test_the_table_of_switches_is_complete_and_true():
    text = (ROOT / "README.md").read_text()
    table = set(SWITCH.findall(text[text.index("## Switches") : text.index("## More")]))
    assert table == environment_switches()


@pytest.mark.parametrize("number,printed", [(0, "torch.Size([1, 8, 64])"), (1, "True")])
def test_the_examples_run(number, printed, tmp_path):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(examples) == 2
    run = subprocess.run(
        [sys.executable, "-c", examples[number]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(printed)
