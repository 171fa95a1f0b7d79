"""The matrix of docs/limits.md is that of its table, and every answer in it has tests."""

from __future__ import annotations

import functools
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITER = runpy.run_path(str(ROOT / "docs" / "works_with.py"))
TABLE = WRITER["table"]()
CELLS = {place: (answer, tests) for place, answer, tests in WRITER["cells"](TABLE)}
CHECKED = {"yes", "error", "on a GPU"}
ANSWERS = CHECKED | {
    "n. a.", "untested", "as in torch", "made again", "once", "twice", "each tile", "not planned",
}  # fmt: skip


@functools.cache
def sources():
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    return {path: path.read_text(encoding="utf-8") for path in paths}


def test_the_page_is_that_of_the_table():
    text = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    assert WRITER["page"](text) == text, "run `python docs/works_with.py`"


@pytest.mark.parametrize("place", CELLS)
def test_an_answer_has_tests_that_exist(place):
    answer, tests = CELLS[place]
    assert answer in ANSWERS
    assert tests or answer not in CHECKED
    for name in tests:
        test, _, case = name.rstrip("]").partition("[")
        of_test = [
            path for path, text in sources().items() if f"def {test}(" in text or path.name == test
        ]
        assert of_test, f"{name} is no test"
        # Cases are made where the test is, or in what tests share.
        shared = [path for path in sources() if path.parent == ROOT / "tests"]
        words = re.compile(rf"\b{re.escape(case)}\b")
        assert any(words.search(sources()[path]) for path in [*of_test, *shared]), name


def test_every_feature_is_in_every_row_of_the_table():
    for row in TABLE["row"]:
        assert row.keys() == {"with", *TABLE["features"]}
