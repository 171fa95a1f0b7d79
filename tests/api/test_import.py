"""The public surface: its names, their documentation, and that importing changes nothing."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from types import FunctionType, ModuleType

import pytest

import recoup

# Run by a fresh interpreter. torch is imported first, so that what torch changes is not held
# against recoup; whatever differs afterwards is ours.
PROBE = """
import json, os, sys, warnings
import torch

def state():
    return {
        "environ": dict(os.environ),
        "filters": [repr(entry) for entry in warnings.filters],
        "rng": torch.get_rng_state().tolist(),
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "hook": repr(sys.excepthook),
        "packages": sorted({name.partition(".")[0] for name in sys.modules}),
    }

before = state()
import recoup
print(json.dumps([before, state()]))
"""


def test_every_module_is_found_by_its_dotted_name():
    """No public function hides a module or package; none needs what is optional (triton)."""
    for name in (each.name for each in pkgutil.walk_packages(recoup.__path__, "recoup.")):
        module = importlib.import_module(name)
        package, _, last = name.rpartition(".")
        assert getattr(sys.modules[package], last) is module, name


def output_of(code, *options):
    command = [sys.executable, *options, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


def test_import_changes_nothing_and_brings_no_other_package():
    before, after = json.loads(output_of(PROBE, "-W", "error"))
    new = set(after.pop("packages")) - set(before.pop("packages"))
    assert new - set(sys.stdlib_module_names) == {"recoup"}
    assert after == before


STEPS = """
import sys, torch, recoup

x = torch.ones(4, 4, requires_grad=True)
net = recoup.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)), memory="sqrt")
net(recoup.checkpoint(torch.tanh, x)).sum().backward()
recoup.plan(net, x, budget="1 MiB", blocks=[*net]).apply()
recoup.measure(lambda: net(x).sum().backward())
assert x.grad is not None
print("torch._dynamo" in sys.modules)
"""


def test_steps_do_not_import_the_compiler():
    """Torch's wrapper of dispatch modes imports it at the first operator, for two seconds."""
    assert output_of(STEPS).split() == ["False"]


def public_objects():
    """Every public name, dotted, with its object: those of recoup and of its public modules."""
    found = {}
    for name in recoup.__all__:
        value = getattr(recoup, name)
        found[f"recoup.{name}"] = value
        if isinstance(value, ModuleType):
            found |= {f"recoup.{name}.{inner}": getattr(value, inner) for inner in value.__all__}
    return found


OBJECTS = public_objects()
CALLABLES = {
    name: value for name, value in OBJECTS.items() if isinstance(value, (type, FunctionType))
}


@pytest.mark.parametrize("name", sorted(set(CALLABLES) | {"recoup.errors", "recoup.schedules"}))
def test_public_names_and_methods_are_documented_with_an_example(name):
    value = OBJECTS[name]
    text = value.__doc__ or ""
    # One that was written for it, and not made by `dataclass`.
    assert text.strip()
    assert not text.startswith(f"{name.rpartition('.')[2]}("), f"{name} has no docstring"
    kinds = FunctionType, property, classmethod, staticmethod
    methods = [m for m, each in vars(value).items() if m[0] != "_" and isinstance(each, kinds)]
    if not isinstance(value, ModuleType):
        assert [each for each in methods if not inspect.getdoc(getattr(value, each))] == []
    if name in CALLABLES and not (isinstance(value, type) and issubclass(value, Exception)):
        assert "Example:" in text, f"{name} has no example"
        assert ">>>" in text, f"the example of {name} does not run"
