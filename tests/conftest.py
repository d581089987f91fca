"""Every test that takes `backend` runs on all of them, or on those named with --backend."""

import os
from contextlib import nullcontext
from dataclasses import replace

# Threads that wait must not spin: tests often share their cores. Read when torch starts its threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

import pagedkern.reference  # noqa: F401  (registers torch.ops.pagedkern_reference)
from pagedkern.testing.backends import BACKENDS, Backend, by_name


def pytest_addoption(parser):
    parser.addoption("--backend", action="append", help="run the op tests on this backend; may be given again")
    parser.addoption("--every-case", action="store_true", help="also the cases that a slow backend leaves out")
    parser.addoption("--random-cases", type=int, default=400, help="cases of the randomised differential test")


def pytest_configure(config):
    config.addinivalue_line("markers", "cases(list): run the test for each of the cases that the backend can take")
    config.addinivalue_line("markers", "one_order: of the virtual GPU's orders one will do: the case list has them all")
    config.addinivalue_line("markers", "every(n): of their randomised cases the virtual GPU's orders run each n-th")
    config.addinivalue_line("markers", "ops(*names): the ops a test calls, for backends that do not have all of them")


def pytest_generate_tests(metafunc):
    if "random_seed" in metafunc.fixturenames:
        seeds = range(metafunc.config.getoption("--random-cases"))
        metafunc.parametrize("random_seed", seeds, ids=[f"seed_{seed}" for seed in seeds])
    if "backend" not in metafunc.fixturenames:
        return
    names = metafunc.config.getoption("--backend") or [backend.name for backend in BACKENDS]
    backends = [by_name(name) for name in names]
    if metafunc.config.getoption("--every-case"):
        backends = [replace(backend, max_work=float("inf")) for backend in backends]
    marker = metafunc.definition.get_closest_marker("cases")
    if marker is None:
        metafunc.parametrize("backend", backends, ids=lambda backend: backend.name)
        return
    pairs = [(backend, case) for backend in backends for case in cases_for(backend, marker.args[0])]
    metafunc.parametrize("backend,case", pairs, ids=[f"{backend.name}-{case.name}" for backend, case in pairs])


def cases_for(backend, cases):
    """Those it can take; where its hardware is missing one is enough to say so."""
    taken = [case for case in cases if backend.takes(case)]
    return taken[:1] if backend.hardware else taken


def needed_ops(item) -> set[str]:
    """The ops a test says it calls: by its mark, or its parameter `op`. Empty: it does not say, and may call any."""
    marker = item.get_closest_marker("ops")
    op = item.callspec.params.get("op")
    return {*(marker.args if marker else ()), *([op] if isinstance(op, str) else ())}


def takes_order(item, backend, params) -> bool:
    """Tests marked one_order run in the last order; the random cases are shared out among the orders."""
    orders = [b.name for b in BACKENDS if b.order is not None and b.namespace == backend.namespace]
    if item.get_closest_marker("one_order"):
        return backend.name == orders[-1]
    seed = params.get("random_seed", orders.index(backend.name))
    marker = item.get_closest_marker("every")
    return (
        seed % len(orders) == orders.index(backend.name)
        and seed // len(orders) % (marker.args[0] if marker else 1) == 0
    )


def runs_here(item) -> bool:
    """Whether the backend of a test has all it needs."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if "backend" not in params:
        return True
    backend = params["backend"]
    if not isinstance(backend, Backend):
        return False  # none of the cases is for any of the backends
    if backend.hardware and params.get("random_seed", 0) > 0:
        return False  # one case is enough to say what is missing
    if backend.ops is None:
        return True
    if backend.order is not None and not takes_order(item, backend, params):
        return False
    if hasattr(params.get("case"), "op_name"):
        return backend.takes(params["case"])
    options = params.get("options")
    dtype = options.get("dtype") if isinstance(options, dict) else params.get("dtype")
    if dtype == torch.float32 and not backend.float32:
        return False
    names = needed_ops(item)
    return bool(names) and backend.has(names)


def is_sampled(item) -> bool:
    backend = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
    return not isinstance(backend, Backend) or backend.samples(item.nodeid)


def pytest_collection_modifyitems(config, items):
    # Deselected, and counted as such: what cannot run on a backend is no pass and no skip there.
    chosen = [item for item in items if runs_here(item) and (config.getoption("--every-case") or is_sampled(item))]
    if len(chosen) < len(items):
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen


@pytest.fixture(autouse=True)
def _needs_hardware(request):
    backend = request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else None
    if backend is not None and backend.hardware:
        pytest.skip(f"backend {backend.name} needs {backend.hardware}")


@pytest.fixture(autouse=True)
def _runs_everything_there(request):
    """Tests that call torch.ops themselves find Triton's kernels on the virtual GPU too."""
    backend = request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else None
    with backend.session() if getattr(backend, "triton", False) else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _same_seed():
    torch.manual_seed(0)
