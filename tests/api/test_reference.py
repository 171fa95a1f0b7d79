"""The API reference names every public object, once, under a name that can be imported."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import recoup
import recoup.gradients
import recoup.memory

PAGES = sorted((Path(__file__).parents[2] / "docs" / "api").glob("*.rst"))
ENTRIES = [
    name
    for page in PAGES
    for name in re.findall(
        r"^\.\. (?:auto|py:)\w+:: (\S+)$", page.read_text(encoding="utf-8"), re.M
    )
]
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


def test_what_the_reference_names_is_public():
    """A name of `recoup` does not go from `__all__` unseen."""
    named = {entry.removeprefix("recoup.") for entry in ENTRIES if entry.count(".") == 1}
    assert named | {"__version__"} >= set(recoup.__all__) - MODULES
    assert named - {"__main__", "gradients", "integrations", "memory"} <= set(recoup.__all__)


def test_nothing_is_in_the_reference_twice():
    assert [entry for entry, count in Counter(ENTRIES).items() if count > 1] == []


def test_every_page_of_the_reference_is_in_its_table_of_contents():
    text = (PAGES[0].parent / "index.rst").read_text(encoding="utf-8")
    contents = set(text.rpartition("toctree::")[2].split())
    assert {page.stem for page in PAGES} - contents == {"index"}
