"""Every instruction form has a row in forms.txt naming the test that executes it (conftest.py sees to it)."""

import pathlib
import re

from forms_table import read_table

from pagedkern import vgpu

HERE = pathlib.Path(__file__).parent


def test_every_form_has_a_row():
    forms, rows = {name for name, _ in vgpu.instruction_forms()}, set(read_table())
    assert not forms - rows, f"no test executes these forms; test them or refuse them: {sorted(forms - rows)}"
    assert not rows - forms, f"forms.txt has rows for unknown forms: {sorted(rows - forms)}"


def test_every_row_names_a_test():
    sources = {}
    for test in set(read_table().values()):
        file, function = re.fullmatch(r"([\w.]+)::(\w+)(\[.*\])?", test).groups()[:2]
        text = sources.setdefault(file, (HERE / file).read_text())
        assert f"def {function}(" in text, test
