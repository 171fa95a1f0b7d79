"""What the documentation shows runs, and what it names exists: tests, pages and public objects."""

from __future__ import annotations

import doctest
import functools
import importlib
import io
import re
import runpy
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

import recoup
import recoup.gradients
import recoup.memory

ROOT = Path(__file__).parents[2]
SOURCE = Path(recoup.__file__).parent
PAGES = sorted([ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")])
OTHERS = [ROOT / f"{name}.md" for name in ("CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY")]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))  # run when the site is built


def read(path):
    return path.read_text(encoding="utf-8")


# -- examples, links and names ---------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page):
    for block in re.findall(r"```python\n(.*?)```", read(page), re.DOTALL):
        exec(compile(block, page.name, "exec"), {})


@pytest.mark.sampled(15)
@pytest.mark.parametrize("path", [p for p in sorted(SOURCE.rglob("*.py")) if ">>>" in read(p)])
def test_examples_of(path):
    """Each runs as a reader would run what is printed: with the names that it imports itself."""
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    report, num_examples = io.StringIO(), 0
    place = path.relative_to(SOURCE.parent).with_suffix("")
    module = importlib.import_module(".".join(place.parts).removesuffix(".__init__"))
    for test in doctest.DocTestFinder().find(module, globs={"__name__": "__main__"}):
        torch.manual_seed(0)
        num_examples += len(test.examples)
        runner.run(test, out=report.write)
    assert not report.getvalue(), report.getvalue()
    assert num_examples > 0, f"{path} has `>>>` in a place where no docstring is"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS, *TUTORIALS], ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", read(page)):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for target in re.findall(r"`((?:tests|src|docs)/[\w/.-]+)`", read(page)):
        assert page.parent != ROOT or (ROOT / target).exists(), f"{page.name} names {target}"


def test_the_tests_that_pages_name_exist():
    text = "\n".join(read(page) for page in [*PAGES, *TUTORIALS])
    named = set(re.findall(r"`(test_\w+)`", text)) - {"test_images"}  # of a file of data
    assert named
    for name in named:
        assert f"def {name}(" in "\n".join(sources().values()), name
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert list((ROOT / "tests").rglob(name)), name


# -- the matrix of docs/limits.md ------------------------------------------------------------------

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
    return {path: read(path) for path in paths}


def test_the_page_is_that_of_the_table():
    text = read(ROOT / "docs" / "limits.md")
    assert WRITER["page"](text) == text, "run `python docs/works_with.py`"


@pytest.mark.parametrize("place", CELLS)
def test_an_answer_has_tests_that_exist(place):
    answer, tests = CELLS[place]
    assert answer in ANSWERS
    assert tests or answer not in CHECKED
    for name in tests:
        test, _, case = name.rstrip("]").partition("[")
        of_test = [p for p, text in sources().items() if f"def {test}(" in text or p.name == test]
        assert of_test, f"{name} is no test"
        # Cases are made where the test is, or in what tests share.
        shared = [path for path in sources() if path.parent == ROOT / "tests"]
        words = re.compile(rf"\b{re.escape(case)}\b")
        assert any(words.search(sources()[path]) for path in [*of_test, *shared]), name


def test_every_feature_is_in_every_row_of_the_table():
    assert all(row.keys() == {"with", *TABLE["features"]} for row in TABLE["row"])


# -- the reference ---------------------------------------------------------------------------------

REFERENCE = sorted((ROOT / "docs" / "api").glob("*.rst"))
ENTRY = re.compile(r"^\.\. (?:auto|py:)\w+:: (\S+)$", re.MULTILINE)
ENTRIES = [name for page in REFERENCE for name in ENTRY.findall(read(page))]
MODULES = {name for name in recoup.__all__ if isinstance(getattr(recoup, name), ModuleType)}
PACKAGES = [recoup, recoup.gradients, recoup.memory, *(getattr(recoup, m) for m in sorted(MODULES))]


def object_of(entry):
    module, _, name = entry.rpartition(".")
    found = getattr(importlib.import_module(module or entry), name, None)
    return importlib.import_module(entry) if found is None else found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(package):
    documented = {id(object_of(entry)) for entry in ENTRIES}
    missing = [name for name in package.__all__ if id(getattr(package, name)) not in documented]
    assert not missing, f"{package.__name__}: name {missing} on a page of docs/api"


def test_what_the_reference_names_is_public_and_named_once():
    """A name of `recoup` does not go from `__all__` unseen."""
    named = {entry.removeprefix("recoup.") for entry in ENTRIES if entry.count(".") == 1}
    assert named | {"__version__"} >= set(recoup.__all__) - MODULES
    assert named - {"__main__", "gradients", "integrations", "memory"} <= set(recoup.__all__)
    assert [entry for entry, count in Counter(ENTRIES).items() if count > 1] == []


def test_every_page_of_the_reference_is_in_its_table_of_contents():
    contents = set(read(REFERENCE[0].parent / "index.rst").rpartition("toctree::")[2].split())
    assert {page.stem for page in REFERENCE} - contents == {"index"}
