"""Curves of memory and time against depth, as a table or a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression

import torch

from recoup._arguments import check_callable, check_whole, is_whole, shown
from recoup.errors import RecoupError
from recoup.memory.meter import check_device
from recoup.memory.points import Point, build_name, measure_point, measuring
from recoup.memory.size import aligned


@dataclass(frozen=True, slots=True)
class Curve:
    """The memory and time of a training step at several depths, in several memory modes.

    Args:
        build: name of the builder.
        device: the device on which it ran.
        points: one point for each depth and memory mode.

    Example:
        >>> from recoup.memory import Curve, Point
        >>> points = [Point(n, "linear", 2**20 * n, 0) for n in (4, 8, 16)]
        >>> print(Curve("chain:build", "cpu", tuple(points)))
        chain:build on cpu
        depth  memory  peak MiB  held MiB
            4  linear      4.00      0.00
            8  linear      8.00      0.00
           16  linear     16.00      0.00
        peak grows as depth^1.00 (linear)
    """

    build: str
    device: str
    points: tuple[Point, ...]

    def memories(self) -> list[str | int]:
        """Return the memory modes, in the order in which they were given."""
        return list(dict.fromkeys(point.memory for point in self.points))

    def of(self, memory: str | int) -> list[Point]:
        """Return the points of one memory mode, in order of depth."""
        points = [point for point in self.points if point.memory == memory]
        return sorted(points, key=lambda point: point.depth)

    def exponents(self) -> dict[str | int, float]:
        """Return the exponent with which the peak grows with depth, for each memory mode.

        The exponent is the slope of a least-squares line through the logarithms: 1 where memory
        grows with depth, 0.5 where it grows with the square root of depth, 0 where it is constant.
        A fixed part of the peak lowers it. It is NaN for fewer than two depths, or if a peak is 0.
        """
        return {memory: _exponent(self.of(memory)) for memory in self.memories()}

    def table(self) -> str:
        """Return the points as text, one per line; times are those of one step."""
        header = ["depth", "memory", "peak MiB", "held MiB"]
        timed = any(point.seconds is not None for point in self.points)
        header += ["step ms"] if timed else []
        rows = [header]
        for point in self.points:
            sizes = [f"{size / 2**20:.2f}" for size in (point.peak_bytes, point.held_bytes)]
            row = [str(point.depth), str(point.memory), *sizes]
            row += [_ms(point.seconds)] if timed else []
            rows.append(row)
        return "\n".join(aligned(rows, left=[1]))

    def __str__(self) -> str:
        growth = [
            f"depth^{exponent:.2f} ({memory})"
            for memory, exponent in self.exponents().items()
            if not math.isnan(exponent)
        ]
        lines = [f"{self.build} on {self.device}", self.table()]
        return "\n".join([*lines, f"peak grows as {', '.join(growth)}"] if growth else lines)

    def figure(self, path: str | os.PathLike[str]) -> Path:
        """Draw peak memory and step time against depth; return the path of the picture.

        The file is written completely or not at all; missing folders are created. Drawing needs
        matplotlib (``pip install 'recoup[plots]'``), and does not change its global state.

        Args:
            path: the path of the file; its ending sets the format: ``.png``, ``.svg``, ``.pdf``.

        Returns:
            The path.

        Raises:
            ImportError: if matplotlib is missing.
            ValueError: if `path` has another ending, or there are no points.
        """
        from recoup.memory.figures import path_of, render, write_whole

        if not self.points:
            raise ValueError("`points` is empty, so there is nothing to draw. Measure some first.")
        points = {memory: self.of(memory) for memory in self.memories()}
        whole = path_of(path)
        return write_whole(whole, render(points, whole.suffix))


def curve(
    build: Callable[..., object] | str,
    depths: Sequence[int],
    memories: Sequence[str | int],
    *,
    device: torch.device | str = "cpu",
    repeats: int = 3,
    num_threads: int = 1,
    progress: Callable[[Point], object] | None = None,
) -> Curve:
    """Measure memory and time of a training step against depth, each point in a fresh process.

    Each process seeds torch with 0, calls ``build(depth=..., memory=...)`` with `device` as the
    default device, and runs one warm-up step, one step whose memory is measured, and `repeats`
    timed steps. It measures as `recoup.measure` does, with the same limits.

    `build` returns one of

    - ``(module, inputs)``, with `inputs` one value or a tuple of arguments: a step is forward, the
      sum of the outputs that require a gradient, and backward. Both are moved to `device`. The
      gradients of parameters are allocated before the measured step, so they are not in the peak;
    - a function without arguments that runs a whole training step.

    With ``chain.py`` in the current folder,

    ::

        def build(depth, memory):
            blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(depth)]
            return recoup.Sequential(*blocks, memory=memory), torch.randn(1024, 64)

    ``curve("chain:build", [4, 16, 64], ["linear", "sqrt"]).figure("chain.png")`` draws the picture.

    Args:
        build: a function that another process can import, or its name: ``"module:function"`` or
            ``"path/to/file.py:function"``. A script that holds it, and calls `curve`, does so under
            ``if __name__ == "__main__":``, since that process imports it.
        depths: the values of `depth` for `build`, such as numbers of blocks; each at least 1.
        memories: the values of `memory` for `build`, such as memory modes.
        device: ``"cpu"`` or an accelerator.
        repeats: number of timed steps, of which the fastest counts; 0 for no times.
        num_threads: number of threads of torch on the CPU.
        progress: a function that is called with each point once it is measured.

    Returns:
        The points, printable; see also `Curve.figure`.

    Raises:
        ValueError: if an argument is invalid.
        RecoupError: if the builder or its step failed; the message has the last line of the error.

    Example:
        >>> from recoup import curve
        >>> curve("chain:build", depths=[0], memories=["linear"])
        Traceback (most recent call last):
        ValueError: `depths` is [0], but must hold numbers of at least 1.
    """
    name = build_name(build)
    for what, given in {"depths": depths, "memories": memories}.items():
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"`{what}` is {shown(given)}, but must be a list, such as [4, 8, 16] or "
                '["linear", "sqrt"].'
            )
    if not all(map(is_whole, depths)):
        raise ValueError(f"`depths` is {shown(depths)}, but must hold numbers of at least 1.")
    check_whole(0, repeats=repeats)
    check_whole(num_threads=num_threads)
    where = check_device(device)
    if progress is not None:
        check_callable(progress=progress)
    if measuring:
        raise RecoupError(
            "`curve` was called while its process imported the builder, by the script that holds "
            'it. Put that call under `if __name__ == "__main__":`.'
        )
    points: list[Point] = []
    for depth in sorted(set(depths)):
        for memory in dict.fromkeys(memories):
            points.append(measure_point(name, depth, memory, str(where), repeats, num_threads))
            if progress is not None:
                progress(points[-1])
    return Curve(name, str(where), tuple(points))


def _exponent(points: list[Point]) -> float:
    if len({point.depth for point in points}) < 2 or min(point.peak_bytes for point in points) <= 0:
        return math.nan
    depths = [math.log(point.depth) for point in points]
    peaks = [math.log(point.peak_bytes) for point in points]
    return linear_regression(depths, peaks).slope


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"
