"""Holds every test to its rows of forms.txt, which PAGEDKERN_WRITE_FORMS=1 pytest tests/vgpu writes anew."""

import os

import pytest
from forms_table import read_table, write_table

from pagedkern import vgpu


class Recorder:
    def __init__(self):
        self.counts = vgpu.executed_forms()
        self.tests = {}  # form -> tests that executed it
        self.claims = {}
        for form, test in read_table().items():
            self.claims.setdefault(test, set()).add(form)

    def step(self, test):
        """The forms executed since the last step."""
        counts = vgpu.executed_forms()
        fresh = {form for form, n in counts.items() if n != self.counts.get(form)}
        self.counts = counts
        for form in fresh:
            self.tests.setdefault(form, []).append(test)
        return fresh


@pytest.fixture(scope="session")
def form_recorder():
    recorder = Recorder()
    yield recorder
    if os.environ.get("PAGEDKERN_WRITE_FORMS"):
        write_table(recorder.tests)


@pytest.fixture(autouse=True)
def form_claims(request, form_recorder):
    """Holds every test to its rows of the table."""
    yield
    test = request.node.nodeid.rsplit("/", 1)[-1]
    fresh = form_recorder.step(test)
    if not os.environ.get("PAGEDKERN_WRITE_FORMS"):
        missing = form_recorder.claims.get(test, set()) - fresh
        assert not missing, f"forms.txt names this test for forms it does not execute: {sorted(missing)}"
