"""What the documentation shows runs, and the tests that it names exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")])
OTHERS = [ROOT / f"{name}.md" for name in ("CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY")]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))  # run when the site is built


dead_links = runpy.run_path(str(ROOT / "docs" / "check_links.py"))["dead_links"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, page.name, "exec"), {})


@pytest.mark.parametrize("page", [*PAGES, *OTHERS, *TUTORIALS], ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    if page.parent == ROOT:
        for target in re.findall(r"`((?:tests|src|docs)/[\w/.-]+)`", text):
            assert (ROOT / target).exists(), f"{page.name} names {target}"


def test_the_tests_that_pages_name_exist():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in [*PAGES, *TUTORIALS])
    named = set(re.findall(r"`(test_\w+)`", text)) - {"test_images"}  # of a file of data
    assert named
    for name in named:
        assert f"def {name}(" in sources, name
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert list((ROOT / "tests").rglob(name)), name


def test_links_of_the_site_that_lead_nowhere(tmp_path):
    (tmp_path / "api").mkdir()
    (tmp_path / "picture.png").write_bytes(b"")
    (tmp_path / "api" / "plans.html").write_text('<h1 id="plans">Plans</h1><a href="../no.html">')
    (tmp_path / "index.html").write_text(
        '<a href="api/plans.html#plans"><a href="#">'
        '<a href="https://elsewhere.org/no.html"><img src="picture.png">'
        '<a href="api/plans.html#none"><img src="none.png"><a href="#nowhere">'
    )
    assert sorted(dead_links(tmp_path)) == [
        "api/plans.html: ../no.html",
        "index.html: #nowhere",
        "index.html: api/plans.html#none",
        "index.html: none.png",
    ]
