"""No op reads or writes one byte outside its tensors: they lie between unmapped pages, in a process that may die."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("where", ["end", "start"])
def test_no_access_outside_the_tensors(backend, where):
    if backend.device != "cpu":
        return  # unmapped pages guard host memory alone
    script = Path(__file__).with_name("guard_page_run.py")
    run = subprocess.run([sys.executable, script, backend.name, where], capture_output=True, text=True)
    last = run.stdout.splitlines()[-1] if run.stdout else "nothing"
    assert run.returncode == 0 and last == "all passed", f"ended with {run.returncode} at {last}\n{run.stderr[-2000:]}"


@pytest.mark.parametrize("at_end,index", [(True, 10), (False, -1)])
def test_the_guards_guard(at_end, index):
    """One byte past either end kills the process."""
    program = f"""
import ctypes, torch
from pagedkern.testing.guard_pages import between_guards
tensor = between_guards(torch.arange(10, dtype=torch.uint8), {at_end})
print(ctypes.c_uint8.from_address(tensor.data_ptr() + 9).value, flush=True)
ctypes.c_uint8.from_address(tensor.data_ptr() + {index}).value
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "9\n" and run.returncode < 0
