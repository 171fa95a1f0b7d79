"""Workflows, templates and metadata say the same as the code, the Makefile and the constraints."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import recoup

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

in_a_repository = pytest.mark.skipif(not GITHUB.exists(), reason="an sdist leaves it out")


def text_of(*names):
    return ROOT.joinpath(*names).read_text(encoding="utf-8")


def jobs_of(name):
    return yaml.safe_load((GITHUB / "workflows" / name).read_text(encoding="utf-8"))["jobs"]


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
    for repository, count in ((None, 0), ("https://example.org/recoup/", 4)):
        if repository:
            monkeypatch.setenv("RECOUP_REPOSITORY", repository)
        update(metadata := {})
        assert len(metadata["urls"]) == count
    assert metadata["urls"]["Issues"] == "https://example.org/recoup/issues"
    assert metadata["urls"]["Repository"] == "https://example.org/recoup"
