"""Curves as figures: what is drawn in which unit and format, and nothing else of matplotlib."""

from __future__ import annotations

import sys

import pytest

from recoup.memory import Curve, Point, figures

matplotlib = pytest.importorskip("matplotlib")


def made(*memories, **values):
    points = [
        Point(depth, memory, 2**20 * depth, 0, **values)
        for depth in (4, 16)
        for memory in memories or ("linear", "sqrt")
    ]
    return Curve("chain:build", "cpu", tuple(points))


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".PDF", b"%PDF"), (".svg", b"<?xml")]
)
def test_formats(tmp_path, monkeypatch, suffix, start):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would raise
    # Read beneath its own methods, which import pyplot when asked for the backend.
    before = dict(dict.items(matplotlib.rcParams))
    path = made(seconds=0.1).figure(tmp_path / "new" / f"curve{suffix}")
    assert path.read_bytes().startswith(start)
    assert [file.name for file in path.parent.iterdir()] == [f"curve{suffix}"]
    assert dict(dict.items(matplotlib.rcParams)) == before


def svg(curve):
    """A figure with its text as text, so that a test can read it."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        return figures.render({m: curve.of(m) for m in curve.memories()}, ".svg").decode()


FOUR = made("linear", "sqrt", "constant", "other")
ONE = Curve("chain:build", "cpu", (Point(1, "linear", 0, 0, 0.0, 0.0),))
PEAK, TIME = "Peak memory of a step", "Time of a step"


@pytest.mark.parametrize(
    ("curve", "parts", "absent"),
    [
        (made("linear", 3, seconds=0.25), [
            f"{PEAK} (MiB)", f"{TIME} (ms)", "Depth (blocks)", "linear  16", "3 slots  16",
            "linear  250", "3 slots  250"], []),
        (made(seconds=2.5), [f"{TIME} (s)"], [f"{TIME} (ms)"]),
        (made(), [PEAK], ["Time"]),
        (FOUR, ["#d55e00", "#0072b2", "#009e73", "#e69f00"], []),
        (ONE, [PEAK], []),
    ],
)  # fmt: skip
def test_what_is_drawn_in_which_unit(curve, parts, absent):
    text = svg(curve)
    assert [part for part in parts if part not in text] == []
    assert [part for part in absent if part in text] == []


@pytest.mark.parametrize("name", ["curve", "curve.gif", "curve.csv"])
def test_what_cannot_be_drawn(tmp_path, name):
    with pytest.raises(ValueError, match=r"must end in one of \.png, \.svg, \.pdf"):
        made().figure(tmp_path / name)
    with pytest.raises(ValueError, match="`points` is empty"):
        Curve("chain:build", "cpu", ()).figure(tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'recoup\[plots\]'"):
        made().figure(tmp_path / "curve.png")
