from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from recoup.memory import Curve, Point
from recoup.recipes import curve_command as module
from recoup.recipes.curve_command import curve_command

BUILDERS = Path(__file__).parents[1] / "memory" / "builders.py"


@pytest.fixture
def measured(monkeypatch):
    """Stand in for the measurements; gives back what they were asked for."""
    asked = {}

    def curve(build, depths, memories, *, progress, **options):
        asked.update(options, build=build, depths=depths, memories=memories)
        points = [Point(n, memory, 2**20 * n, 0, 0.5) for n in depths for memory in memories]
        for point in points:
            progress(point)
        return Curve(build, "cpu", tuple(points))

    monkeypatch.setattr(module, "curve", curve)
    return asked


def test_prints_the_table_and_the_progress(measured, capsys):
    assert curve_command("chain:build", [4, 8], ["linear", "3"], repeats=2) == 0
    assert measured["memories"] == ["linear", 3]
    assert measured["repeats"] == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("chain:build on cpu\ndepth  memory  peak MiB")
    assert printed.err.splitlines()[0] == "[1/4] depth 4, linear: 4 MiB, 500 ms"
    assert printed.err.splitlines()[-1] == "[4/4] depth 8, 3: 8 MiB, 500 ms"


def test_writes_the_files(measured, capsys, tmp_path):
    files = {"csv": tmp_path / "new" / "points.csv", "figure": tmp_path / "new" / "curve.png"}
    assert curve_command("chain:build", [4, 8], ["linear"], **files) == 0
    assert all(path.is_file() for path in files.values())
    assert f"figure: {files['figure']}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_point_of_a_real_builder(capsys):
    assert curve_command(f"{BUILDERS}:held_values", [4], ["linear"], repeats=0) == 0
    assert "1.00      0.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": [0]}, "`depths` holds 0"),
        ({"build": "chain"}, '`build` is "chain", but must name a function'),
        ({"device": "abacus"}, '`device` is "abacus"'),
        ({"figure": Path("curve.gif")}, 'ends in ".gif"'),
        ({"csv": Path()}, "is a folder"),
        ({"csv": Path("points.csv")}, "points.csv may not be written here"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_is_measured(
    options, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # as of a folder of somebody else
    arguments = {"build": "chain:build", "depths": [4], "memories": ["linear"], **options}
    assert curve_command(**arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("recoup: error: ")
    assert message in printed.err
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_nothing_is_measured(measured, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    figure = Path("curve.png")
    assert curve_command("chain:build", [4], ["linear"], figure=figure) == 2
    assert "pip install 'recoup[plots]'" in capsys.readouterr().err
    assert measured == {}
