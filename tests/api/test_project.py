"""Rules of the house that no linter knows, and what files beside the code say of it."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import recoup

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
GITHUB = ROOT / ".github"
MACHINE_PATH = re.compile(r"(?<![\w.~$})/-])/(?:tmp|root|home|work|mnt|Users)/")
# Names that say nothing about what is inside.
NAMELESS = {"common", "helper", "helpers", "misc", "util", "utils"}

in_a_repository = pytest.mark.skipif(not GITHUB.exists(), reason="an sdist leaves it out")


def text_of(*names):
    return ROOT.joinpath(*names).read_text(encoding="utf-8")


PROJECT = tomllib.loads(text_of("pyproject.toml"))["project"]


def tracked_files():
    """All files that git tracks, or would if they were added."""
    if not (ROOT / ".git").exists():
        return [p for folder in ("src", "tests") for p in sorted((ROOT / folder).rglob("*.py"))]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = sorted(set(listing.stdout.split("\0")) - {""})
    return [ROOT / name for name in names if (ROOT / name).is_file()]


FILES = tracked_files()


# -- the code --------------------------------------------------------------------------------------


def imports_of(path, names):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in names:
            wholes = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (whole if whole in names else node.module for whole in wholes)


def test_no_imports_go_in_circles():
    """Not within functions either, and not for types alone."""
    parts = {path: path.relative_to(ROOT / "src").with_suffix("").parts for path in SOURCES}
    names = {".".join(each).removesuffix(".__init__"): path for path, each in parts.items()}
    left = {name: set(imports_of(path, names)) - {name} for name, path in names.items()}
    while free := [name for name, found in left.items() if not found & left.keys()]:
        for name in free:
            del left[name]
    assert sorted(left) == []


def test_every_file_has_a_telling_name():
    parts = {path: {Path(part).stem for part in path.relative_to(ROOT).parts} for path in FILES}
    assert [str(path) for path, names in parts.items() if names & NAMELESS] == []


def test_no_path_of_a_machine_is_left():
    found = []
    for path in FILES:
        if b"\0" not in (content := path.read_bytes()):
            lines = enumerate(content.decode("utf-8").splitlines(), start=1)
            found += [f"{path}:{n}: {line}" for n, line in lines if MACHINE_PATH.search(line)]
    assert found == []


# -- versions, workflows and metadata --------------------------------------------------------------


def test_t1_the_oldest_versions_that_are_promised_are_those_that_are_tested():
    extras = PROJECT["optional-dependencies"].values()
    named = [*PROJECT["dependencies"], *(each for extra in extras for each in extra)]
    found = [re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", each) for each in named]
    bounds = {match[1]: match[2] for match in found if match is not None}  # without exact ones
    assert {"torch", "lightning", "transformers"} <= bounds.keys()
    lines = text_of("constraints-oldest.txt").splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    for name, bound in bounds.items():  # 2.11 and 2.11.0 are one version
        assert f"{bound}.0.0"[: len(tested[name])] == tested[name], name


def jobs_of(name):
    return yaml.safe_load(text_of(".github", "workflows", name))["jobs"]


def steps_of(name):
    return [step for job in jobs_of(name).values() for step in job["steps"]]


@in_a_repository
def test_every_python_that_is_named_is_tested():
    named = [each.rpartition(" :: ")[2] for each in PROJECT["classifiers"] if ":: 3." in each]
    assert jobs_of("tests.yml")["test"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


@in_a_repository
@pytest.mark.parametrize("name", ["tests.yml", "release.yml"])
def test_what_workflows_make_can_be_made(name):
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    made = [step["run"].split()[1] for step in steps_of(name) if "make " in step.get("run", "")[:5]]
    assert made
    assert set(made) <= targets


@in_a_repository
def test_workflows_pin_actions_of_others_and_only_what_publishes_may_write():
    """By commit; a tag may be moved. The one that publishes keeps up with the package index."""
    for path in (GITHUB / "workflows").glob("*.yml"):
        for action in (step["uses"] for step in steps_of(path.name) if "uses" in step):
            if action != "pypa/gh-action-pypi-publish@release/v1":
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {"contents": "read"}, path.name
        writing = {name for name, job in workflow["jobs"].items() if "permissions" in job}
        assert writing == ({"publish", "announce"} if path.name == "release.yml" else set())


@in_a_repository
def test_pre_commit_runs_the_ruff_of_the_check():
    hooks = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"]
    (rev,) = (each["rev"] for each in hooks if each["repo"].endswith("/ruff-pre-commit"))
    assert f"ruff=={rev.removeprefix('v')}" in PROJECT["optional-dependencies"]["dev"]


def test_the_citation_has_the_version():
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == recoup.__version__


def test_addresses_are_those_of_where_it_is_built(monkeypatch):
    pytest.importorskip("hatchling")
    scope = {}
    exec(compile(text_of("hatch_build.py"), "hatch_build.py", "exec"), scope)
    update = scope["Addresses"](str(ROOT), {}).update
    monkeypatch.delenv("RECOUP_REPOSITORY", raising=False)
    update(metadata := {})
    assert len(metadata["urls"]) == 0
    monkeypatch.setenv("RECOUP_REPOSITORY", "https://example.org/recoup/")
    update(metadata := {})
    assert len(metadata["urls"]) == 4
    assert metadata["urls"]["Issues"] == "https://example.org/recoup/issues"
    assert metadata["urls"]["Repository"] == "https://example.org/recoup"
