from __future__ import annotations

import sys

import pytest

from recoup.memory import Curve, Point, figures

matplotlib = pytest.importorskip("matplotlib")


def made(memories=("linear", "sqrt"), depths=(4, 16), **values):
    points = [
        Point(depth, memory, 2**20 * depth, 0, **values) for depth in depths for memory in memories
    ]
    return Curve("chain:build", "cpu", tuple(points))


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".PDF", b"%PDF"), (".svg", b"<?xml")]
)
def test_formats(tmp_path, suffix, start):
    path = made(seconds=0.1).figure(tmp_path / "new" / f"curve{suffix}")
    assert path.read_bytes().startswith(start)
    assert [file.name for file in path.parent.iterdir()] == [f"curve{suffix}"]


def svg(curve):
    # Text as text, so that a test can read it.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        return figures.render({m: curve.of(m) for m in curve.memories()}, ".svg").decode()


def test_says_what_is_drawn_in_which_unit():
    text = svg(made(["linear", 3], seconds=0.25))
    for part in ("Peak memory of a step (MiB)", "Time of a step (ms)", "Depth (blocks)"):
        assert part in text
    for label in ("linear  16.0", "3 slots  16.0", "linear  250", "3 slots  250"):
        assert label in text
    assert "Time of a step (s)" in svg(made(seconds=2.5))


def test_without_times_there_is_one_panel():
    text = svg(made())
    assert "Peak memory" in text
    assert "Time" not in text


def test_one_point_and_no_bytes_can_be_drawn():
    svg(Curve("chain:build", "cpu", (Point(1, "linear", 0, 0, 0.0, 0.0),)))


def test_lines_that_coincide_differ_in_every_way():
    text = svg(made(["linear", "sqrt", "constant", "other"]))
    for color in ("#d55e00", "#0072b2", "#009e73", "#e69f00"):
        assert color in text
    assert len(set(figures._MARKERS)) == len(figures._MARKERS)


@pytest.mark.parametrize("name", ["curve", "curve.gif", "curve.csv"])
def test_unknown_format(tmp_path, name):
    with pytest.raises(ValueError, match=r"must end in one of \.png, \.svg, \.pdf"):
        made().figure(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'recoup\[plots\]'"):
        made().figure(tmp_path / "curve.png")


def test_the_state_of_matplotlib_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # Importing it would raise.
    # Read beneath its own methods, which import pyplot when asked for the backend.
    before = dict(dict.items(matplotlib.rcParams))
    made(seconds=0.1).figure(tmp_path / "curve.png")
    assert dict(dict.items(matplotlib.rcParams)) == before
