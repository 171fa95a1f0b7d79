"""The command: what it prints, its exit codes, and where it finds a module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import recoup
from recoup.__main__ import main

MODELS = """
import sys
import torch
import recoup

def blocks(n):
    return [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(n)]

def loss_with_words(y):
    raise ValueError("`blocks` is a word of the loss")

def raises():
    raise KeyError("two\\nlines")

model = lambda x, n=4: (torch.nn.Sequential(*blocks(n)), x)
chain = lambda depth, memory: (recoup.Sequential(*blocks(depth), memory=memory), torch.ones(64, 8))
build = lambda: model(torch.ones(64, 8))
keywords = lambda: model({"input": torch.ones(64, 8)}, n=3)
misfit = lambda: model(torch.ones(2, 3))
nothing = lambda: 3
loss = lambda y: y.square().mean()
wrong_loss = lambda y: 1 / 0
loss_that_ends = lambda y: sys.exit()
ends = lambda: sys.exit("bad configuration")
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
    "explain models:build --html step.png": "must end in .html",
    "explain models:build --figure plan.gif": "must end in one of .png",
    "explain models:build --figure folder.png": "folder.png is a folder",
    "explain models:build --blocks nowhere": "`--blocks` is 'nowhere'",
    "explain models:build --loss models:loss_with_words": "`blocks` is a word of the loss",
    "explain models:build --estimate --tiles": "`--tiles` needs a step that is run",
    "explain models:nothing": "returned a int, but must return a model",
    "explain models": "must name a function as",
    "explain elsewhere:build": "No module named 'elsewhere'",
    "curve": "the following arguments are required: BUILD",
    "curve models:chain --depths 4 x": "argument --depths: invalid int value: 'x'",
    "curve models:chain --device abacus": '`--device` is "abacus"',
}


FAILURES = {
    "explain models:build --budget 1KiB": "`--budget` is 1 KiB (1024 bytes), but the least",
    "explain models:build --budget 1KiB --estimate": "a step of this model was seen to take",
    "explain models:raises": "`build` (models:raises) raised KeyError: 'two",
    "explain models:misfit": "raised RuntimeError",
    "explain models:build --loss models:wrong_loss --budget 1MiB": "raised ZeroDivisionError",
    "explain models:ends --estimate": "raised SystemExit: bad configuration (",
    "explain models:build --loss models:loss_that_ends": "raised SystemExit",
    "explain program.py:build": "program.py, line 2)",
}


@pytest.mark.parametrize("line", [*MISTAKES, *FAILURES])
def test_a_mistake_is_one_line_and_the_code_is_1_if_nothing_fits_or_code_raises(line, capsys):
    Path("folder.png").mkdir()
    before = list(sys.path)
    assert main(line.split()) == (2 if line in MISTAKES else 1)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith("recoup: error: ")
    assert (MISTAKES | FAILURES)[line] in printed.err
    if line in MISTAKES:
        assert sys.path == before
        assert printed.err.count("\n") == 1


def test_explain(capsys):
    args = "explain models:build --budget 8GiB --loss models:loss"
    assert main([*args.split(), "--figure", "new/plan.svg", "--html", "new/step.html"]) == 0
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
    options = ["--depths", "4", "4", "--repeats", "0", "--memories"]
    assert main(["curve", "models:chain", *options, "2", "--figure", "a.png"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("models:chain on cpu\ndepth  memory  peak MiB")
    assert printed.err.splitlines()[0].startswith("[1/1] depth 4, 2: ")
    assert printed.out.endswith("figure: a.png\n")
    assert main(["curve", "models:chain", *options, "constant"]) == 1
    assert "constant" in capsys.readouterr().err.splitlines()[-1]


SCRIPT = """
import json, runpy, sys

names = "lightning", "jsonargparse", "matplotlib", "PIL", "rich", "sklearn", "yaml"
sys.modules |= dict.fromkeys(names)  # importing one raises
sys.path.pop(0)  # a script has its own folder there, and not the working directory
codes = []
for line in json.loads(sys.argv.pop()):
    sys.argv[1:] = line.split()
    try:
        runpy.run_module("recoup", run_name="__main__")
    except SystemExit as end:
        codes.append(end.code)
print(json.dumps(codes))
"""


def test_a_process_finds_a_module_in_its_working_directory_and_needs_torch_alone_but_for_figures():
    options = "--budget 1KiB", "--budget 1MiB", "--figure plan.png"
    lines = json.dumps([f"explain models:build {each}" for each in options])
    command = [sys.executable, "-c", SCRIPT, lines]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert json.loads(done.stdout.splitlines()[-1]) == [1, 0, 2]
    assert "the least that a step of this model" in done.stderr
    assert "pip install 'recoup[plots]'" in done.stderr.splitlines()[-1]


def test_help_says_how_to_call_it_and_the_version_what_it_runs_on(capsys):
    for call in ("recoup COMMAND", "recoup explain BUILD", "recoup curve BUILD"):
        assert main([*call.split()[1:-1], "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: {call} [options]\n\n")
    assert main(["--version"]) == 0
    assert f"recoup {recoup.__version__} (Python " in capsys.readouterr().out
