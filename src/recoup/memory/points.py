"""The points of a curve, each measured in a process of its own.

What is measured is named by a string, as on a command line, so that another process can build it.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from recoup._core.pytree import flatten
from recoup.errors import RecoupError
from recoup.memory.meter import Measurement, measure

Step = Callable[[], object]

measuring: list[str] = []
"""The builder whose steps this process measures, in a process that `measure_point` has started."""


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


def measure_point(
    build: str, depth: int, memory: str | int, device: str, repeats: int, num_threads: int
) -> Point:
    """Measure one point in a fresh process; the arguments are those of `curve`.

    Raises:
        ValueError: if the builder cannot be found, or its result is not a training step.
        RecoupError: if the builder or the step failed.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            with _without_script():
                answer = process.submit(
                    measured, build, depth, memory, device, repeats, num_threads
                )
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


def _step_of(build: Callable[..., object], depth: int, memory: str | int, device: str) -> Step:
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


def training_step(module: nn.Module, inputs: object) -> Step:
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
        >>> from recoup.memory.points import build_name, load_builder
        >>> build_name("chain.py:build")
        'chain.py:build'
        >>> build_name(load_builder)
        'recoup.memory.points:load_builder'
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
