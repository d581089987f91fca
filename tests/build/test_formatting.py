"""What `make fmt` would change, nothing."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_clang_format_and_ruff_have_nothing_to_do():
    run = subprocess.run(["make", "-s", "check-fmt"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"run `make fmt`:\n{run.stdout}{run.stderr}"
