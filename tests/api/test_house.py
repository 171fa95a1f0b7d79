"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

MACHINE_PATH = re.compile(r"(?<![\w.~$})/-])/(?:tmp|root|home|work|mnt|Users)/")
# Names that say nothing about what is inside.
NAMELESS = {"common", "helper", "helpers", "misc", "util", "utils"}


def tracked_files():
    """All files that git tracks, or would if they were added."""
    if not (ROOT / ".git").exists():
        return [
            path for folder in ("src", "tests") for path in sorted((ROOT / folder).rglob("*.py"))
        ]
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = sorted(set(listing.stdout.split("\0")) - {""})
    return [ROOT / name for name in names if (ROOT / name).is_file()]


FILES = tracked_files()


def lines_matching(pattern):
    texts = {path: path.read_bytes() for path in FILES}
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, content in texts.items()
        if b"\0" not in content
        for number, line in enumerate(content.decode("utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


def imports_of(path, names):
    """The modules of ours that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in names:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in names else node.module


def test_no_imports_go_in_circles():
    """Not within functions either, and not for types alone."""
    names = {}
    for path in SOURCES:
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    below = {name: set(imports_of(path, names)) - {name} for name, path in names.items()}
    left = dict(below)
    while free := [name for name, found in left.items() if not found & left.keys()]:
        for name in free:
            del left[name]
    assert sorted(left) == []


def lower_bounds():
    """The oldest version of each package that pyproject.toml names, but for exact ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    named = [*project["dependencies"], *(each for extra in extras for each in extra)]
    found = [re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", each) for each in named]
    return {match[1]: match[2] for match in found if match is not None}


def test_t1_the_oldest_versions_that_are_promised_are_those_that_are_tested():
    lines = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    bounds = lower_bounds()
    assert {"torch", "lightning", "transformers"} <= bounds.keys()
    # 2.11 and 2.11.0 are one version.
    assert {name: f"{bound}.0.0"[: len(tested[name])] for name, bound in bounds.items()} == {
        name: tested[name] for name in bounds
    }


def test_every_file_has_a_telling_name():
    parts = {path: {Path(part).stem for part in path.relative_to(ROOT).parts} for path in FILES}
    assert [str(path) for path, names in parts.items() if names & NAMELESS] == []


def test_no_path_of_a_machine_is_left():
    assert lines_matching(MACHINE_PATH) == []
