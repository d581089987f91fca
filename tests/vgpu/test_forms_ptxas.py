"""A sample of the forms goes through ptxas: what the assembler refuses must not be in the table."""

import random
import shutil
import subprocess

import pytest
import test_forms_atomic
import test_forms_compare
import test_forms_convert
import test_forms_float
import test_forms_integer
import test_forms_memory
from forms_kernel import lane_module

PTXAS = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")

FAMILIES = {
    "integer": (test_forms_integer.integer_forms, test_forms_integer.carry_forms, test_forms_integer.special_forms),
    "logic": (test_forms_integer.logic_forms, test_forms_integer.shift_forms, test_forms_integer.lop3_forms),
    "float": (test_forms_float.arithmetic_forms, test_forms_float.pick_forms, test_forms_float.approximate_forms),
    "half": (test_forms_float.half_forms, test_forms_float.sign_forms),
    "convert": (
        test_forms_convert.int_to_int_forms,
        test_forms_convert.float_to_int_forms,
        test_forms_convert.int_to_float_forms,
        test_forms_convert.float_to_float_forms,
        test_forms_convert.pair_forms,
        test_forms_convert.fp8_forms,
    ),
    "compare": (test_forms_compare.setp_forms, test_forms_compare.set_forms, test_forms_compare.select_forms),
    "memory": (lambda: test_forms_memory.plain_forms("ld"), lambda: test_forms_memory.modified_forms("st")),
    "atomic": (test_forms_atomic.read_modify_write_forms, test_forms_atomic.exchange_forms),
}


@pytest.mark.skipif(PTXAS is None, reason="ptxas is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_assembler_accepts(family, tmp_path):
    rng = random.Random(family)
    forms = [form for make in FAMILIES[family] for form in rng.sample(list(make()), 12)]
    source = tmp_path / "forms.ptx"
    source.write_text(lane_module(forms)[0])
    command = [PTXAS, "-arch=sm_90a", "-O0", str(source), "-o", str(tmp_path / "forms.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
