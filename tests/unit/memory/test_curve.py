"""Curves: points that processes measure, their exponents, tables and files."""

from __future__ import annotations

import csv
import functools
import importlib
import math
import sys
from pathlib import Path

import pytest

from recoup.errors import RecoupError
from recoup.memory import Curve, Point, curve
from recoup.memory.points import WITHIN_WORKER, build_name

BUILDERS = Path(__file__).with_name("builders.py")
UNIT_BYTES = 256 * 1024
MEMORIES = ["linear", "sqrt"]


def build_here(depth, memory):
    """At the top level, as in a script."""


class Builder:
    def build(self, depth, memory):
        """Bound to an object."""


def by_hand(**changes):
    values = {"seconds": 0.004, "cpu_seconds": 0.003, **changes}
    points = [
        Point(depth, memory, int(2**20 * depth**exponent), 0, **values)
        for depth in (4, 16, 64)
        for memory, exponent in (("linear", 1), ("sqrt", 0.5), (3, 0))
    ]
    return Curve("chain:build", "cpu", tuple(points))


@pytest.mark.slow
def test_each_point_is_measured():
    reported = []
    build = f"{BUILDERS}:held_values"
    result = curve(build, [16, 4, 4], MEMORIES, repeats=1, progress=reported.append)
    num_units = {"linear": lambda n: n, "sqrt": math.isqrt}
    expected = [(depth, memory) for depth in (4, 16) for memory in MEMORIES]
    assert [(point.depth, point.memory) for point in result.points] == expected
    for point in result.points:
        assert point.peak_bytes == UNIT_BYTES * num_units[point.memory](point.depth)
        assert point.held_bytes == 0
        assert min(point.seconds, point.cpu_seconds) > 0
    assert tuple(reported) == result.points
    assert result.exponents() == pytest.approx({"linear": 1, "sqrt": 0.5}, abs=1e-6)


def test_exponents_are_a_least_squares_fit_of_two_points_or_more():
    points = [Point(n, "log", p, 0) for n, p in ((1, 100), (2, 210), (4, 390), (8, 805))]
    # The slope by hand: sum((i - 1.5) * log2(p_i)) / sum((i - 1.5)^2), with i = log2(depth).
    slope = sum((i - 1.5) * math.log2(point.peak_bytes) for i, point in enumerate(points)) / 5
    assert Curve("b", "cpu", tuple(points)).exponents()["log"] == pytest.approx(slope)
    for few in ([Point(4, "m", 10, 0)], [Point(4, "m", 0, 0), Point(8, "m", 10, 0)]):
        result = Curve("b", "cpu", tuple(few))
        assert math.isnan(result.exponents()["m"])
        assert "grows" not in str(result)


def test_printed():
    assert by_hand().table().splitlines()[:4] == [
        "depth  memory  peak MiB  held MiB  step ms  CPU ms",
        "    4  linear      4.00      0.00     4.00    3.00",
        "    4  sqrt        2.00      0.00     4.00    3.00",
        "    4  3           1.00      0.00     4.00    3.00",
    ]
    table = by_hand(seconds=None, cpu_seconds=None).table()
    assert table.splitlines()[0] == "depth  memory  peak MiB  held MiB"
    lines = str(by_hand()).splitlines()
    assert lines[0] == "chain:build on cpu"
    assert lines[-1] == "peak grows as depth^1.00 (linear), depth^0.50 (sqrt), depth^0.00 (3)"


def test_csv(tmp_path):
    path = by_hand().to_csv(tmp_path / "new" / "points.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    assert rows[1] == {
        "build": "chain:build",
        "device": "cpu",
        "depth": "4",
        "memory": "sqrt",
        "peak_bytes": str(2**21),
        "held_bytes": "0",
        "seconds": "0.004",
        "cpu_seconds": "0.003",
    }


def test_a_file_is_there_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "points.csv"
    path.write_text("as it was")

    def full(self, content):
        self.touch()
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="disk full"):
        by_hand().to_csv(path)
    assert path.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_function_is_found_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "chain_on_the_path.py").write_text(
        "def build(depth, memory):\n    raise KeyError(memory)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    chain_on_the_path = importlib.import_module("chain_on_the_path")
    with pytest.raises(RecoupError) as caught:
        curve(chain_on_the_path.build, [4], ["sqrt"])
    assert str(caught.value) == (
        "\"chain_on_the_path:build\" failed at depth=4, memory='sqrt' on cpu: KeyError: 'sqrt'"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (f"{BUILDERS}:killed", RecoupError, r"by SIGKILL \(memory of the machine exhausted"),
        ("nowhere:build", ValueError, '`build` is "nowhere:build": No module named'),
    ],
)
def test_a_process_that_fails(build, error, message):
    with pytest.raises(error, match=message):
        curve(build, [4], ["linear"])


def local_builders():
    def local(depth, memory):
        """Seen by this function alone."""

    return [local, lambda depth, memory: None, functools.partial(local, 4), Builder().build]


@pytest.mark.parametrize("build", local_builders())
def test_what_another_process_cannot_import(build):
    with pytest.raises(ValueError, match=r"`build` is .* cannot import.*at the top level"):
        curve(build, [4], ["linear"])


def test_a_function_of_a_script_is_named_by_its_file(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.touch()
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(script), raising=False)
    monkeypatch.setattr(main, "build_here", build_here, raising=False)
    monkeypatch.setattr(build_here, "__module__", "__main__")
    assert build_name(build_here) == f"{script}:build_here"
    monkeypatch.delattr(main, "__file__")
    with pytest.raises(ValueError, match="of an interactive session"):
        build_name(build_here)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depths": []}, r"`depths` is \[\], but must be a list"),
        ({"depths": [4, 0]}, r"`depths` is \[4, 0\], but must hold numbers"),
        ({"memories": "linear"}, "`memories` is 'linear', but must be a list"),
        ({"repeats": -1}, "`repeats` is -1"),
        ({"num_threads": 0}, "`num_threads` is 0"),
        ({"device": "meta"}, '`device` is "meta"'),
        *(
            ({"build": name}, 'must name a function as "module:function"')
            for name in ("build", "module:", ":build", "module:a.b")
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        curve(**{"build": "chain:build", "depths": [4], "memories": ["linear"], **arguments})


def test_a_worker_does_not_start_workers(monkeypatch):
    monkeypatch.setenv(WITHIN_WORKER, "1")
    with pytest.raises(RecoupError, match='under `if __name__ == "__main__":`'):
        curve("chain:build", [4], ["linear"])
