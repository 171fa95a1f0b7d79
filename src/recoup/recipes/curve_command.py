"""The command ``recoup curve``: memory and time against depth for a builder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from recoup.memory import Point, curve, format_bytes
from recoup.recipes.checks import check_outputs
from recoup.recipes.mistakes import MISTAKES, report_mistake

__all__ = ["curve_command"]


def curve_command(
    build: str,
    depths: Sequence[int] = (4, 8, 16, 32),
    memories: Sequence[str] = ("linear", "sqrt", "constant"),
    device: str = "cpu",
    repeats: int = 3,
    csv: Path | None = None,
    figure: Path | None = None,
) -> int:
    """Measure memory and time of a training step against depth, and print a table.

    Args:
        build: the builder, as "module:function" or "path/to/file.py:function"; it is called as
            build(depth=..., memory=...) and returns (module, inputs), or a function that runs a
            training step.
        depths: numbers of blocks.
        memories: memory modes, such as linear, sqrt or constant; a number stands for slots.
        device: cpu or a CUDA device.
        repeats: number of timed steps, the best of which counts; 0 for no times.
        csv: write the points to this file.
        figure: draw the curve into this file (.png, .svg or .pdf).

    Returns:
        The exit code: 0, or 2 if something was wrong, explained in one line on stderr.
    """
    num_points = len(set(depths)) * len(set(memories))
    measured = 0

    def report(point: Point) -> None:
        nonlocal measured
        measured += 1
        time = "" if point.seconds is None else f", {1e3 * point.seconds:.4g} ms"
        print(
            f"[{measured}/{num_points}] depth {point.depth}, {point.memory}: "
            f"{format_bytes(point.peak_bytes)}{time}",
            file=sys.stderr,
            flush=True,
        )

    try:
        check_outputs(csv, figure, figure=figure)
        modes = [int(memory) if memory.isdecimal() else memory for memory in memories]
        result = curve(build, depths, modes, device=device, repeats=repeats, progress=report)
        print(result)
        if csv is not None:
            print(f"points: {result.to_csv(csv)}")
        if figure is not None:
            print(f"figure: {result.figure(figure)}")
    except MISTAKES as error:
        return report_mistake(error)
    return 0
