"""The division of the CUDA cache writers is the IEEE one: every mantissa of a scale, and of a 16-bit value."""

import os
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_quotient_is_rounded_as_a_division_is(tmp_path):
    compiler, binary = shlex.split(os.environ.get("CXX", "c++")), tmp_path / "quotient"
    # Both sides in plain float32: no contraction, but vectors and the machine's own fused multiply-add.
    flags = ["-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*compiler, *flags, Path(__file__).with_name("quotient.cpp"), "-o", binary], check=True)
    counted = subprocess.run([binary], capture_output=True, text=True, check=True)
    assert counted.stdout.strip() == "0"
