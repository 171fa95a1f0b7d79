"""Curves of memory and time against depth; each point is measured in a process of its own.

What is measured is named by a string, as on a command line, so that another process can build it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from recoup._arguments import check_callable, check_whole, is_whole, shown
from recoup._core.pytree import flatten
from recoup.errors import RecoupError
from recoup.memory.meter import Measurement, check_device, measure
from recoup.memory.size import aligned

measuring: list[str] = []
"""The builder whose steps this process measures, in a process that `curve` has started."""


@dataclass(frozen=True, slots=True)
class Point:
    """The measured memory and time of a training step at one depth, in one memory mode.

    `Curve.points` holds one for each depth and mode. Bytes and seconds are those of one step:
    forward, loss and backward.

    Args:
        depth: the number that the builder was given, such as the number of blocks.
        memory: the memory mode that the builder was given, such as "sqrt".
        peak_bytes: the most bytes alive at one time while the step ran, beyond those alive before
            it; parameters and the gradients of earlier steps are left out.
        held_bytes: the bytes alive after the step, beyond those alive before it.
        seconds: the wall time of the fastest step, in seconds; None if no step was timed.

    Example:
        >>> from recoup.memory import Point
        >>> point = Point(depth=16, memory="sqrt", peak_bytes=3 * 2**20, held_bytes=0)
        >>> point.peak_bytes / point.depth, point.seconds
        (196608.0, None)
    """

    depth: int
    memory: str | int
    peak_bytes: int
    held_bytes: int
    seconds: float | None = None


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
        timed = any(point.seconds is not None for point in self.points)
        rows = [["depth", "memory", "peak MiB", "held MiB", *(["step ms"] if timed else [])]]
        for point in self.points:
            sizes = [f"{size / 2**20:.2f}" for size in (point.peak_bytes, point.held_bytes)]
            ms = "" if point.seconds is None else f"{1e3 * point.seconds:.2f}"
            rows.append([str(point.depth), str(point.memory), *sizes, *([ms] if timed else [])])
        return "\n".join(aligned(rows, left=[1]))

    def __str__(self) -> str:
        growth = [
            f"depth^{exponent:.2f} ({memory})"
            for memory, exponent in self.exponents().items()
            if not math.isnan(exponent)
        ]
        lines = [f"{self.build} on {self.device}", self.table()]
        lines += [f"peak grows as {', '.join(growth)}"] if growth else []
        return "\n".join(lines)

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
            points.append(_measure_point(name, depth, memory, str(where), repeats, num_threads))
            if progress is not None:
                progress(points[-1])
    return Curve(name, str(where), tuple(points))


def _exponent(points: list[Point]) -> float:
    if len({point.depth for point in points}) < 2 or min(point.peak_bytes for point in points) <= 0:
        return math.nan
    logarithms = [(math.log(point.depth), math.log(point.peak_bytes)) for point in points]
    return linear_regression(*zip(*logarithms, strict=True)).slope


# -- points ----------------------------------------------------------------------------------------


def _measure_point(
    build: str, depth: int, memory: str | int, device: str, repeats: int, num_threads: int
) -> Point:
    """Measure one point in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            with _without_script():
                given = (build, depth, memory, device, repeats, num_threads)
                answer = process.submit(measured, *given)
            found = answer.result()
        except BuildError as error:
            raise BuildError(f'`build` is "{build}": {error}') from error
        except (RecoupError, BrokenProcessPool) as error:
            is_gone = isinstance(error, BrokenProcessPool)
            reason = "its process ended; it wrote why, unless the machine's memory was exhausted."
            raise RecoupError(
                f'"{build}" failed at depth={depth}, memory={memory!r} on {device}: '
                f"{reason if is_gone else error}"
            ) from error
    return Point(depth, memory, found.peak_bytes, found.held_bytes, found.seconds)


@contextmanager
def _without_script() -> Generator[None]:
    """Return a context in which a new process does not run the script of this one again."""
    own = vars(sys.modules["__main__"])
    kept = {name: own[name] for name in ("__file__", "__spec__") if name in own}
    own.pop("__file__", None)
    own["__spec__"] = None
    try:
        yield
    finally:
        own.update(kept)


def measured(
    build: str, depth: int, memory: str | int, device: str, repeats: int, num_threads: int
) -> Measurement:
    """Measure a step in this process; any error but a `BuildError` is a `RecoupError`."""
    measuring.append(build)
    torch.set_num_threads(num_threads)
    try:
        with redirect_stdout(sys.stderr):  # a builder may print
            step = _step_of(load_builder(build), depth, memory, device)
            step()  # allocates gradients, optimizer state and workspaces
            return measure(step, device=device, repeats=repeats)
    except BuildError:
        raise
    except (Exception, SystemExit) as error:  # of which some cannot be sent to another process
        raise RecoupError(" ".join(f"{type(error).__name__}: {error}".split())) from error
    finally:
        measuring.pop()


def _step_of(
    build: Callable[..., object], depth: int, memory: str | int, device: str
) -> Callable[[], object]:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    with torch.device(device):
        built = build(depth=depth, memory=memory)
    if callable(built) and not isinstance(built, nn.Module):
        return built
    pair = cast("tuple[object, ...]", built) if isinstance(built, tuple) else ()
    if len(pair) == 2 and isinstance(pair[0], nn.Module):
        inputs = tree_map_only(Tensor, lambda leaf: leaf.to(device), pair[1])
        return training_step(pair[0].to(device), inputs)
    raise BuildError(
        f"it returned {type(cast('object', built)).__name__}, but must return a training step "
        "(a function without arguments) or a pair (module, inputs)."
    )


def training_step(module: nn.Module, inputs: object) -> Callable[[], None]:
    """Return a step: forward, the sum of all outputs, backward, which accumulates gradients."""
    arguments = cast("tuple[Any, ...]", inputs) if isinstance(inputs, tuple) else (inputs,)

    def step() -> None:
        outputs = [each for each in flatten(module(*arguments))[0] if each.requires_grad]
        if not outputs:
            raise BuildError("no output of its module requires a gradient.")
        torch.autograd.backward([output.sum() for output in outputs])

    return step


# -- builders --------------------------------------------------------------------------------------


class BuildError(ValueError):
    """The builder cannot be found, or its result cannot be used as a training step."""


def build_name(build: Callable[..., object] | str) -> str:
    """Return a name by which another process can import a builder: ``"module:function"``.

    Args:
        build: a function at the top level of a module or script, or its name, in which a path to
            a file (``"models/chain.py:build"``) can stand for the module.

    Returns:
        The name.

    Raises:
        ValueError: if another process cannot import `build`.

    Example:
        >>> from recoup.memory.curves import build_name, load_builder
        >>> build_name("chain.py:build")
        'chain.py:build'
        >>> build_name(load_builder)
        'recoup.memory.curves:load_builder'
    """
    if isinstance(build, str):
        _parts(build, "build")
        return build
    module = getattr(build, "__module__", None) or "?"
    name = getattr(build, "__qualname__", None) or repr(build)
    loaded = sys.modules.get(module)
    script = getattr(loaded, "__file__", None)
    is_session = module == "__main__" and (script is None or not Path(script).is_file())
    if getattr(loaded, name, None) is not build or is_session:
        raise ValueError(
            f"`build` is {name} of {'an interactive session' if is_session else module}, which "
            "another process cannot import, as each point is measured in a fresh one. Define a "
            "function at the top level of a module or script, and give that or its name, "
            '"module:function" or "path/to/file.py:function".'
        )
    return f"{Path(str(script)).resolve() if module == '__main__' else module}:{name}"


def load_builder(name: str) -> Callable[..., object]:
    """Import a function by its name, such as ``"module:function"``.

    A module is imported as by ``import``. A file is run as a module of its own, with its folder at
    the front of `sys.path`, as Python does for a script.

    Args:
        name: ``"module:function"`` or ``"path/to/file.py:function"``; a path is relative to the
            current folder.

    Returns:
        The function.

    Raises:
        ValueError: if there is no such module, file or function.
        Exception: any that the module or file raises when it is imported.

    Example:
        >>> from recoup.memory import load_builder
        >>> load_builder("math:sqrt")(16)
        4.0
    """
    module_name, function_name = _parts(name, "name")
    if module_name.endswith(".py"):
        path = Path(module_name).resolve()
        spec = importlib.util.spec_from_file_location("__recoup_build__", path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise BuildError(f"there is no file {path}.")
        sys.path.insert(0, str(path.parent))  # as Python does for a script
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module was found, but not one that it imports
            raise BuildError(
                f"{error}. Run where it can be imported, or name its file, "
                f'"path/to/file.py:{function_name}".'
            ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise BuildError(f"there is no function {function_name} in {module_name}.")
    return function


def _parts(name: str, argument: str) -> tuple[str, str]:
    """Return a module or file and a function in it, by their common name."""
    module, _, function = name.rpartition(":") if isinstance(name, str) else ("",) * 3  # pyright: ignore[reportUnnecessaryIsInstance]
    if not module or not function.isidentifier():
        raise BuildError(
            f"`{argument}` is {name!r}, but must name a function as "
            '"module:function" or "path/to/file.py:function".'
        )
    return module, function
