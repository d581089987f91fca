"""The table of instruction forms in forms.txt: which test executes each."""

import pathlib
import re

TABLE = pathlib.Path(__file__).with_name("forms.txt")
# The file that is to prove a form: the first pattern that matches. Other files only use the form in passing.
HOMES = (
    (r"(ld|st)\.", "memory"),
    (r"(atom|red)\.", "atomic"),
    (r"(setp|set|selp|slct|mov)\.", "compare"),
    (r"cvt\.", "convert"),
    (r"(shfl|vote|match|redux|elect|activemask|bar\.warp)\b", "warp"),
    (r"cp\.(reduce\.)?async\.bulk.*tensor|tensormap", "test_tma"),
    (r"cp\.(reduce\.)?async\.bulk|red\.async|st\.async", "test_async_bulk"),
    (r"cp\.async", "test_async_copy"),
    (r"mbarrier", "test_async_mbarrier"),
    (r"wgmma", "test_wgmma"),
    (r"mma", "test_tensor_mma"),
    (r"(ldmatrix|stmatrix|movmatrix)", "test_tensor_matrix"),
)


def read_table():
    """{form: test}."""
    rows, test = {}, None
    for line in TABLE.read_text().splitlines() if TABLE.exists() else ():
        if line.startswith("  "):
            rows[line.strip()] = test
        elif line and not line.startswith("#"):
            test = line
    return rows


def home(form):
    found = next((name for pattern, name in HOMES if re.match(pattern, form)), "test_forms")
    return found if found.startswith("test_") else f"test_forms_{found}"


def write_table(executed):
    """executed: {form: tests, first to last}."""
    groups = {}
    for form, tests in executed.items():
        at_home = [t for t in tests if t.startswith(home(form))]
        groups.setdefault((at_home or tests)[0], []).append(form)
    text = "# Which test executes an instruction form. Written by PAGEDKERN_WRITE_FORMS=1 pytest tests/vgpu\n"
    for test in sorted(groups):
        text += test + "\n" + "".join(f"  {form}\n" for form in sorted(groups[test]))
    TABLE.write_text(text)
