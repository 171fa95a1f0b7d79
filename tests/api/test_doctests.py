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


def run_examples(module):
    """Run the examples of `module`: how many there were, and what was said of those that fail.

    Each runs as a reader would run what is printed: with the names that it imports itself.
    """
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    report = io.StringIO()
    num_examples = 0
    for test in doctest.DocTestFinder().find(module, globs={"__name__": "__main__"}):
        torch.manual_seed(0)
        num_examples += len(test.examples)
        runner.run(test, out=report.write)
    return num_examples, report.getvalue()


def test_there_are_examples():
    assert MODULES


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name):
    num_examples, report = run_examples(importlib.import_module(name))
    assert not report, report
    assert num_examples > 0, f"{name} has `>>>` in a place where no docstring is"
