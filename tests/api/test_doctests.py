"""Every example in a docstring runs, and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import io
from pathlib import Path

import pytest
import torch

import recoup

ROOT = Path(recoup.__file__).parent


def modules_with_examples():
    names = []
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT.parent).with_suffix("")
        if ">>>" in path.read_text(encoding="utf-8"):
            names.append(".".join(part for part in place.parts if part != "__init__"))
    return names


MODULES = modules_with_examples()


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name):
    """Each runs as a reader would run what is printed: with the names that it imports itself."""
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    report, num_examples = io.StringIO(), 0
    module = importlib.import_module(name)
    for test in doctest.DocTestFinder().find(module, globs={"__name__": "__main__"}):
        torch.manual_seed(0)
        num_examples += len(test.examples)
        runner.run(test, out=report.write)
    assert not report.getvalue(), report.getvalue()
    assert num_examples > 0, f"{name} has `>>>` in a place where no docstring is"
