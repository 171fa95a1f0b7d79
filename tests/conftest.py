"""What every test can rely on: one seed, one default dtype."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import nullcontext

import hypothesis
import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from recoup.invertible import DriftGuard
from recoup.planning import priced_blocks
from tests.counted_times import times_of
from tests.oracle import hooks_in_force

SEED = 20

# The same examples in every run, and no deadline: machines differ, and benchmarks do the timing.
hypothesis.settings.register_profile("recoup", deadline=None, derandomize=True)
hypothesis.settings.load_profile("recoup")


def pytest_configure():
    # With `-n`, each worker has a core of its own.
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(items):
    mark_all_but_samples(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def mark_all_but_samples(items):
    """Mark as exhaustive all cases of a sampled test but as many as it says, spread over them."""
    cases = {}
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            function = item.nodeid.partition("[")[0]
            cases.setdefault(function, (sampled.args[0], []))[1].append(item)
    for num_samples, found in cases.values():
        taken = {round(k * len(found) / num_samples) for k in range(num_samples)}
        for place, item in enumerate(found):
            if place not in taken:
                item.add_marker(pytest.mark.exhaustive)


def pytest_collection_finish():
    freeze_imports()


@pytest.fixture(autouse=True, scope="module")
def imports_are_frozen():
    """What tests of other modules imported (the compiler, transformers) is not garbage either."""
    freeze_imports()


_num_modules = 0  # that were there when garbage was collected


def freeze_imports():
    """Keep the garbage collector from looking at what was imported: tests run it thousandfold."""
    global _num_modules
    if len(sys.modules) > _num_modules + 20:
        _num_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture
def fresh_compiler():
    """torch.compile without anything from before, and nothing of it left: it keeps tensors."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def drift_is_no_way_out(request):
    """Let the drift guard mend nothing, or a wrong inverse would pass for a right one."""
    is_to_drift = request.node.get_closest_marker("drifts") is not None
    with nullcontext() if is_to_drift else DriftGuard.strict():
        yield


@pytest.fixture(autouse=True)
def counted_times(request, monkeypatch):
    """Let steps that are planned take the time of their counted work, whatever the clock says."""
    if request.node.get_closest_marker("clocked") is None:
        monkeypatch.setattr(priced_blocks, "times_of", times_of)


@pytest.fixture(autouse=True)
def same_start():
    """Seed every test alike, and refuse one that leaves another default dtype behind."""
    dtype = torch.get_default_dtype()
    torch.manual_seed(SEED)
    yield
    left_behind = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    assert left_behind == dtype, "the test changed the default dtype: give `dtype=` instead"
    in_a_mode = is_in_torch_dispatch_mode()
    _python_dispatch._is_in_torch_dispatch_mode = False
    assert not in_a_mode, "the test left a dispatch mode entered"
    assert hooks_in_force() is None, "the test left saved-tensor hooks on the stack"
