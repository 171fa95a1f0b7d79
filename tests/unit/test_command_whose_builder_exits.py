"""A builder, model or loss that ends the process is an error of the command, with a message."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recoup.__main__ import main

MODELS = """
import sys
import torch

def build():
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), torch.ones(2, 4)

def leaves():
    sys.exit()

def says():
    sys.exit("bad configuration")

def counts():
    sys.exit(3)

def loss(y):
    raise SystemExit

def chain(depth, memory):
    sys.exit(0)
"""


@pytest.fixture(autouse=True)
def models(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    Path("program.py").write_text("import sys\nsys.exit()\n")
    yield
    sys.modules.pop("models", None)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("models:leaves --budget 1MiB", "models.py, line 9"),
        ("models:says", "raised SystemExit: bad configuration"),
        ("models:says --estimate", "raised SystemExit: bad configuration"),
        ("models:counts", "raised SystemExit: 3"),
        ("models:build --loss models:loss", "raised SystemExit"),
        ("program.py:build", "program.py, line 2"),
    ],
)
def test_explain(line, said, capsys):
    assert main(["explain", *line.split()]) == 1
    printed = capsys.readouterr().err.splitlines()[-1]
    assert printed.startswith("recoup: error: ")
    assert said in printed


def test_curve(capsys):
    assert main(["curve", "models:chain", "--depths", "2", "--memories", "linear"]) != 0
    assert "SystemExit: 0" in capsys.readouterr().err
