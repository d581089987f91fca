"""Importing the package: a clear error where the op library is missing or does not load, and no import of triton."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkern

PACKAGE = Path(pagedkern.__file__).parent


def run_python(code, path):
    environment = {"PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, "-c", code], cwd=path, env=environment, capture_output=True, text=True)


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "pagedkern", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_missing_library_says_how_to_build(copied):
    error = run_python("import pagedkern", copied).stderr
    assert "ImportError: pagedkern: the op library" in error and "make build" in error and "pip install ." in error


def test_broken_library_says_which_torch_it_needs(copied):
    (copied / "pagedkern/libpagedkern_ops.so").write_bytes(b"not a library")
    error = run_python("import pagedkern", copied).stderr
    assert "does not load under torch" in error and "torch >= 2.11" in error


def test_triton_is_not_imported():
    code = "import sys, pagedkern, pagedkern.kv_layout, pagedkern.log; print('triton' in sys.modules)"
    run = run_python(code, PACKAGE.parent)
    assert run.stdout.strip() == "False", run.stderr
