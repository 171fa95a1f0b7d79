"""The command: what it prints, its exit codes, and where it finds a module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import recoup
from recoup.__main__ import main

MODELS = """
import sys
import torch
import recoup

def blocks(n, width=8):
    return [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(n)]

def build():
    return torch.nn.Sequential(*blocks(4)), torch.ones(64, 8)

def chain(depth, memory):
    return recoup.Sequential(*blocks(depth), memory=memory), torch.ones(64, 8)

def keywords():
    return torch.nn.Sequential(*blocks(3)), {"input": torch.ones(64, 8)}

def raises():
    raise KeyError("two\\nlines")

def misfit():
    return torch.nn.Sequential(*blocks(4)), torch.ones(2, 3)

def nothing():
    return 3

def loss(y):
    return y.square().mean()

def wrong_loss(y):
    return 1 / 0

def ends():
    sys.exit("bad configuration")

def loss_that_ends(y):
    raise SystemExit

"""


@pytest.fixture(autouse=True)
def models(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    Path("program.py").write_text("import sys\nsys.exit()\n")
    monkeypatch.setattr(sys, "path", list(sys.path))  # to which a file adds its folder
    yield
    sys.modules.pop("models", None)


MISTAKES = {
    "": "arguments are required: COMMAND. See `recoup --help`.",
    "explian": "invalid choice: 'explian'",
    "explain": "the following arguments are required: BUILD. See `recoup explain --help`.",
    "explain models:build --budg 3": "unrecognized arguments: --budg 3",
    "explain models:build --budget much": "`--budget` is 'much'",
    "explain models:build --device abacus": "`--device` is abacus, which torch cannot use here",
    "explain models:build --device cuda:99": "`--device` is cuda:99, which torch cannot use here",
    "explain models:build --html step.png": "must end in .html",
    "explain models:build --figure plan.gif": "must end in one of .png",
    "explain models:build --figure folder.png": "folder.png is a folder",
    "explain models:build --blocks nowhere": "`--blocks` is 'nowhere'",
    "explain models:build --estimate --tiles": "`--tiles` needs a step that is run",
    "explain models:build --estimate --device abacus": "`--device` needs a step that is run",
    "explain models:nothing --estimate": "`build` returned a int",
    "explain models:nothing": "returned a int, but must return a model",
    "explain models:nobody": "there is no function nobody",
    "explain models": "must name a function as",
    "explain :build": "must name a function as",
    "explain elsewhere:build": "No module named 'elsewhere'",
    "explain elsewhere.py:build": "there is no file",
    "curve": "the following arguments are required: BUILD",
    "curve models:chain --depths 4 x": "argument --depths: invalid int value: 'x'",
    "curve models:chain --depths 0": "`--depths` is [0]",
    "curve models:chain --device abacus": '`--device` is "abacus"',
    "curve models:nobody --depths 4": "there is no function nobody",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line, capsys):
    Path("folder.png").mkdir()
    before = list(sys.path)
    assert main(line.split()) == 2
    assert sys.path == before
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("recoup: error: ")
    assert printed.err.count("\n") == 1
    assert MISTAKES[line] in printed.err


FAILURES = {
    "models:build --budget 1KiB": "`--budget` is 1 KiB (1024 bytes), but the least that a step",
    "models:build --budget 1KiB --estimate": "the least that a step of this model was seen to take",
    "models:misfit --estimate": "raised RuntimeError",
    "models:raises": "`build` (models:raises) raised KeyError: 'two",
    "models:misfit": "raised RuntimeError",
    "models:build --loss models:wrong_loss --budget 1MiB": "raised ZeroDivisionError",
    "models:ends --budget 1MiB": "raised SystemExit: bad configuration (",
    "models:ends --estimate": "raised SystemExit: bad configuration (",
    "models:build --loss models:loss_that_ends": "raised SystemExit",
    "program.py:build": "program.py, line 2)",
}


@pytest.mark.parametrize("line", FAILURES)
def test_exit_code_1_if_no_step_fits_or_the_users_code_raises(line, capsys):
    assert main(["explain", *line.split()]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith("recoup: error: ")
    assert FAILURES[line] in printed.err


def test_explain(capsys):
    args = ["explain", "models:build", "--budget", "8GiB", "--loss", "models:loss"]
    assert main([*args, "--figure", "new/plan.svg", "--html", "new/step.html"]) == 0
    printed = capsys.readouterr().out
    assert "Plan for Sequential: 4 blocks in 8 GiB" in printed
    assert f"figure: {Path('new/plan.svg')}\ntimeline: {Path('new/step.html')}\n" in printed
    page = Path("new/step.html").read_text(encoding="utf-8")
    assert "Plan for Sequential: 4 blocks" in page
    assert Path("new/plan.svg").stat().st_size > 5000
    assert main(["explain", "models.py:keywords", "--figure", "new/plans.svg"]) == 0
    assert "Plans for Sequential: 3 blocks, from " in capsys.readouterr().out
    assert Path("new/plans.svg").stat().st_size > 5000


def test_curve(capsys):
    options = ["--depths", "4", "8", "4", "--memories", "2", "--repeats", "0"]
    assert main(["curve", "models:chain", *options, "--figure", "a.png"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("models:chain on cpu\ndepth  memory  peak MiB")
    assert printed.err.splitlines()[0].startswith("[1/2] depth 4, 2: ")
    assert printed.out.endswith("figure: a.png\n")


def test_a_point_that_cannot_be_measured_is_one_line(capsys):
    options = ["--depths", "4", "--memories", "constant", "--repeats", "0"]
    assert main(["curve", "models:chain", *options]) == 1
    assert "constant" in capsys.readouterr().err.splitlines()[-1]


def test_help_begins_with_how_to_call_it_and_the_version_names_those_it_runs_on(capsys):
    for command in ("", "explain", "curve"):
        assert main([*command.split(), "--help"]) == 0
        usage, blank, what, *_ = capsys.readouterr().out.splitlines()
        follows = " BUILD" if command else " COMMAND"
        assert usage == f"usage: {f'recoup {command}'.strip()}{follows} [options]"
        assert (blank, what[-1]) == ("", ".")
    assert main(["--version"]) == 0
    version = capsys.readouterr().out
    assert version.startswith(f"recoup {recoup.__version__} (Python ")
    assert torch.__version__ in version


def process(*args, path):
    command = [sys.executable, *args]
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_a_process_finds_a_module_in_its_working_directory_and_ends_with_the_exit_code():
    path = str(Path(recoup.__file__).parents[1])
    done = process("-m", "recoup", "explain", "models:build", "--budget", "1KiB", path=path)
    assert done.returncode == 1
    assert "the least that a step of this model" in done.stderr


def test_the_script_of_the_project_is_this_command():
    project = Path(recoup.__file__).parents[2] / "pyproject.toml"
    if not project.exists():
        pytest.skip("recoup is installed without its repository")
    assert 'recoup = "recoup.__main__:main"' in project.read_text()


SCRIPT = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED = {"lightning", "jsonargparse", "matplotlib", "PIL", "rich", "sklearn", "yaml"}
sys.meta_path.insert(0, Blocker())
sys.path.pop(0)  # a script has its own folder there, and not the working directory
from recoup.__main__ import main
print(json.dumps([main(line.split()) for line in json.loads(sys.argv[1])]))
"""


def test_a_script_finds_that_module_too_and_all_but_figures_needs_torch_alone():
    lines = ["explain models:build --budget 1MiB", "explain models:build --figure plan.png"]
    done = process("-c", SCRIPT, json.dumps(lines), path=os.pathsep.join(sys.path))
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 2]
    assert "pip install 'recoup[plots]'" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_explain_says_what_it_compiles(capsys):
    assert main(["explain", "models:build", "--budget", "1MiB", "--compile"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Plan for Sequential")
    assert ": compiled " in printed.err
