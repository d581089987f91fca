"""Builds inputs and references on one thread; the ops under test run on all (testing.backends)."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _harness_on_one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
