"""paged_attention against the float64 reference on the whole case list."""

import pytest

from pagedkern.testing.cases import ATTENTION_CASES
from pagedkern.testing.judge import judge_attention


@pytest.mark.cases(ATTENTION_CASES)
def test_case(backend, case):
    judge_attention(backend, case)


def test_case_names_are_distinct():
    names = [case.name for case in ATTENTION_CASES]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})
