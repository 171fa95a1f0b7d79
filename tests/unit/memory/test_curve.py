"""Curves: points that processes measure, their exponents, tables, files and pictures."""

from __future__ import annotations

import functools
import math
import sys

import pytest
import torch

from recoup.errors import RecoupError
from recoup.memory import Curve, Point, curve, curves, figures, load_builder
from recoup.memory.curves import build_name, measured, training_step

BUILDERS = """
import torch
from torch import nn

def held_values(depth, memory):
    print("a builder may print")
    num_units = {"linear": depth, "sqrt": round(depth**0.5)}[memory]
    return lambda: [torch.zeros(2**16) for _ in range(num_units)] and None

class Pair(nn.LayerNorm):
    def forward(self, x, shift):
        return (x * self.weight + shift, (self.weight.log().sum(), None, "text"))

def raises(depth, memory):
    raise RuntimeError(f"no chain of {depth}\\nblocks")

blocks = lambda n: (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(n))
chain = lambda depth, memory: (nn.Sequential(*blocks(depth)), (torch.zeros(1024, 64),))
pair = lambda depth, memory: (Pair(3), (torch.full((2, 3), 2.0), 1.0))
frozen = lambda depth, memory: (nn.Linear(2, 2).requires_grad_(False), torch.zeros(1, 2))
module_alone = lambda depth, memory: nn.Linear(2, 2)
number = 3
"""


def build_here(depth, memory):
    return None


def by_hand(*memories, **values):
    def point(depth, memory):
        num_bytes = int(2**20 * depth ** {"sqrt": 0.5, 3: 0}.get(memory, 1))
        return Point(depth, memory, num_bytes, 0, **values)

    points = [point(depth, memory) for depth in (4, 16) for memory in memories]
    return Curve("chain:build", "cpu", tuple(points))


def test_what_another_process_cannot_import_is_refused(monkeypatch, tmp_path):
    for build in (lambda depth, memory: None, functools.partial(build_here, 4)):
        with pytest.raises(ValueError, match=r"`build` is .* cannot import.*at the top level"):
            curve(build, [4], ["linear"])
    # A function of a script is named by its file, which an interactive session does not have.
    main, script = sys.modules["__main__"], tmp_path / "script.py"
    script.touch()
    monkeypatch.setattr(main, "__file__", str(script), raising=False)
    monkeypatch.setattr(main, "build_here", build_here, raising=False)
    monkeypatch.setattr(build_here, "__module__", "__main__")
    assert build_name(build_here) == f"{script}:build_here"
    monkeypatch.delattr(main, "__file__")
    with pytest.raises(ValueError, match="of an interactive session"):
        build_name(build_here)


@pytest.mark.parametrize(("given", "message"), [
    ({"depths": []}, r"`depths` is \[\], but must be a list"),
    ({"memories": "linear"}, "`memories` is 'linear', but must be a list"),
    ({"repeats": -1}, "`repeats` is -1"),
    ({"device": "meta"}, '`device` is "meta"'),
    ({"build": "build"}, "`build` is 'build', but must name a function"),
    ({"build": "module:a.b"}, "`build` is 'module:a.b', but must name a function"),
])  # fmt: skip
def test_wrong_arguments(given, message):
    with pytest.raises(ValueError, match=message):
        curve(**{"build": "chain:build", "depths": [4], "memories": ["linear"]} | given)


def test_a_worker_does_not_start_workers(monkeypatch):
    monkeypatch.setattr(curves, "measuring", ["chain:build"])
    with pytest.raises(RecoupError, match='under `if __name__ == "__main__":`'):
        curve("chain:build", [4], ["linear"])


def test_exponents_are_a_least_squares_fit_of_two_points_or_more():
    points = [Point(n, "log", p, 0) for n, p in ((1, 100), (2, 210), (4, 390), (8, 805))]
    # The slope by hand: sum((i - 1.5) * log2(p_i)) / sum((i - 1.5)^2), with i = log2(depth).
    slope = sum((i - 1.5) * math.log2(point.peak_bytes) for i, point in enumerate(points)) / 5
    assert Curve("b", "cpu", tuple(points)).exponents()["log"] == pytest.approx(slope)
    few = Curve("b", "cpu", (Point(4, "m", 0, 0), Point(8, "m", 10, 0)))
    assert math.isnan(few.exponents()["m"])
    assert "grows" not in str(few)


def test_the_table():
    timed = by_hand("linear", "sqrt", 3, seconds=0.004)
    assert timed.table().splitlines()[:3] == [
        "depth  memory  peak MiB  held MiB  step ms",
        "    4  linear      4.00      0.00     4.00",
        "    4  sqrt        2.00      0.00     4.00",
    ]
    lines = str(timed).splitlines()
    assert lines[0] == "chain:build on cpu"
    assert lines[-1] == "peak grows as depth^1.00 (linear), depth^0.50 (sqrt), depth^0.00 (3)"


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".SVG", b"<?xml")])
def test_formats_of_pictures(tmp_path, monkeypatch, suffix, start):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would raise
    # Read beneath its own methods, which import pyplot when asked for the backend.
    before = dict(dict.items(matplotlib.rcParams))
    path = by_hand("sqrt").figure(tmp_path / "new" / f"curve{suffix}")
    assert path.read_bytes().startswith(start)
    assert [file.name for file in path.parent.iterdir()] == [f"curve{suffix}"]
    assert dict(dict.items(matplotlib.rcParams)) == before


PEAK, TIME = "Peak memory of a step", "Time of a step"


@pytest.mark.parametrize(("curve", "parts", "absent"), [
    (by_hand("linear", 3, "constant", "other", seconds=0.25),
     [f"{PEAK} (MiB)", f"{TIME} (ms)", "Depth (blocks)", "linear  16", "3 slots  1<",
      "linear  250", "3 slots  250", "#d55e00", "#009e73", "#e69f00"], []),
    (by_hand("sqrt", seconds=2.5), [f"{TIME} (s)"], [f"{TIME} (ms)"]),
    (Curve("chain:build", "cpu", (Point(1, "linear", 0, 0),)), [PEAK], ["Time"]),
])  # fmt: skip
def test_what_is_drawn_in_which_unit(curve, parts, absent):
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        drawn = figures.render({m: curve.of(m) for m in curve.memories()}, ".svg").decode()
    assert [part for part in parts if part not in drawn] == []
    assert [part for part in absent if part in drawn] == []


def test_what_cannot_be_drawn(tmp_path, monkeypatch):
    for name in ("curve", "curve.gif"):
        with pytest.raises(ValueError, match=r"must end in one of \.png, \.svg, \.pdf"):
            by_hand("sqrt").figure(tmp_path / name)
    with pytest.raises(ValueError, match="`points` is empty"):
        by_hand().figure(tmp_path / "curve.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'recoup\[plots\]'"):
        by_hand("sqrt").figure(tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Have this process measure a point, and put back what a worker changes in its own."""
    (tmp_path / "builders.py").write_text(BUILDERS)
    num_threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "path", list(sys.path))

    def answer(build, depth=2, memory="linear", *, repeats=0):
        name = build if ":" in build else f"{tmp_path}/builders.py:{build}"
        return measured(name, depth, memory, "cpu", repeats, 1)

    yield answer
    torch.set_num_threads(num_threads)
    sys.modules.pop("__recoup_build__", None)


def test_what_is_measured(ask, capsys):
    units = ask("held_values", 3)
    assert (units.peak_bytes, units.held_bytes, units.seconds) == (3 * 256 * 1024, 0, None)
    assert capsys.readouterr() == ("", "a builder may print\n")
    shallow, deep = ask("chain", 2, repeats=2), ask("chain", 6, repeats=2)
    # Tanh keeps its output, which is the input that Linear keeps; the gradients are there already.
    assert deep.peak_bytes - shallow.peak_bytes == 4 * 1024 * 64 * 4
    assert deep.held_bytes == 0
    assert deep.seconds > 0


def test_every_output_of_any_kind_takes_part(ask, tmp_path):
    assert ask("pair").peak_bytes > 0
    module, inputs = load_builder(f"{tmp_path}/builders.py:pair")(depth=1, memory="linear")
    training_step(module, inputs)()
    # d/dw of sum(x * w) + sum(log w) at w = 1, x = 2, two rows.
    torch.testing.assert_close(module.weight.grad, torch.full((3,), 5.0))


@pytest.mark.parametrize(("build", "error", "message"), [
    ("torch.no_such_module:build", ValueError, "No module named 'torch.no_such_module'. Run where"),
    ("nowhere/chain.py:build", ValueError, "there is no file "),
    ("number", ValueError, "there is no function number in "),
    ("module_alone", ValueError, "it returned Linear, but must return a training step"),
    ("frozen", ValueError, "no output of its module requires a gradient."),
    ("raises", RecoupError, "RuntimeError: no chain of 2 blocks$"),
    ("needs_more:build", RecoupError, "ModuleNotFoundError: No module named 'no_such_package'$"),
])  # fmt: skip
def test_a_builder_that_is_wrong_or_fails(ask, build, error, message, tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=f"^{message}"):
        ask(build)
