"""Every SIMD level that this machine runs, each in a process of its own: the library chooses its level as it loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkern

OPS = Path(__file__).parent
LEVELS = pagedkern.build_info()["cpu_simd_levels"]
USED = pagedkern.build_info()["cpu_simd"]
RUNNABLE = LEVELS[: LEVELS.index(USED) + 1]
# Shapes, dtypes, masks and layouts of the case lists, chosen so that one level takes some seconds.
SUBSET = (
    "decode-head_dim or fp32-cache_dtype or causal_15 or layout_odd or splits-num or every_byte or rounding or seed "
    "or product or all_that_a_step_can_do or dtypes_and or not_finite or sizes_far"
)


def test_levels_are_told_from_the_least_to_the_best():
    order = ["generic", "avx2", "avx512", "avx512_bf16"]
    assert [level for level in order if level in LEVELS] == LEVELS and "generic" in LEVELS


@pytest.mark.parametrize("level", [level for level in LEVELS if level != USED])
def test_level(level):
    """The level in use has all the other tests."""
    if level not in RUNNABLE:
        pytest.skip(f"needs a CPU with {level}")
    environment = os.environ | {"PAGEDKERN_CPU_SIMD": level}
    used = [sys.executable, "-c", "import pagedkern; print(pagedkern.build_info()['cpu_simd'])"]
    assert subprocess.run(used, env=environment, capture_output=True, text=True).stdout.strip() == level
    tests = [OPS / f"test_{name}.py" for name in ("paged_attention", "cache_write", "gather", "merge", "random")]
    tests += [OPS / "test_quantized_linears.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--backend", "cpu", *tests]
    command += ["--random-cases", "60", "-k", SUBSET]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
