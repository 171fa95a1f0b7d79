"""The points of a curve, each measured in a fresh process by `recoup.memory.worker`.

What is measured is named by a string, as on a command line, so that another process can build it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recoup.errors import RecoupError

WITHIN_WORKER = "RECOUP_WITHIN_WORKER"
"""Environment variable that a worker finds set, so that it never starts workers itself."""


@dataclass(frozen=True, slots=True)
class Request:
    """The request for one point, which a worker receives as JSON."""

    build: str
    depth: int
    memory: str | int
    device: str
    repeats: int
    num_threads: int


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
        cpu_seconds: the least processor time of a step, in seconds, summed over all threads; None
            if no step was timed.

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
    cpu_seconds: float | None = None


def measure_point(request: Request) -> dict[str, Any]:
    """Return the answer of a fresh process to `request`.

    Raises:
        ValueError: if the builder cannot be found, or its result is not a training step.
        RecoupError: if the builder or the step failed.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
        "OMP_NUM_THREADS": str(request.num_threads),
        "MKL_NUM_THREADS": str(request.num_threads),
        WITHIN_WORKER: "1",
    }
    # The answer goes to a separate file, since a builder may print.
    with tempfile.TemporaryDirectory(prefix="recoup-") as folder:
        path = Path(folder) / "answer.json"
        process = subprocess.run(
            [sys.executable, "-m", "recoup.memory.worker", str(path)],
            input=json.dumps(asdict(request)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            check=False,
        )
        answer: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if "argument" in answer:
        raise ValueError(f'`build` is "{request.build}": {answer["argument"]}')
    if process.returncode or not answer or "error" in answer:
        reason = answer.get("error") or _reason(process.returncode, process.stderr)
        raise RecoupError(
            f'"{request.build}" failed at depth={request.depth}, memory={request.memory!r} on '
            f"{request.device}: {reason}"
        )
    return answer


def _reason(returncode: int, stderr: str) -> str:
    """Return why a process ended without an answer: its signal, or the last line that it wrote."""
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = " (memory of the machine exhausted?)" if name == "SIGKILL" else ""
        return f"the process was ended by {name}{hint}."
    return stderr.strip().rpartition("\n")[2] or f"the process ended with code {returncode}."


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
        module, _, function = build.rpartition(":")
        if not module or not function.isidentifier():
            raise ValueError(
                f'`build` is "{build}", but must name a function as "module:function" or '
                '"path/to/file.py:function".'
            )
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
    module_name, _, function_name = name.rpartition(":") if isinstance(name, str) else ("",) * 3  # pyright: ignore[reportUnnecessaryIsInstance]
    if not module_name or not function_name:
        raise BuildError(
            f"`name` is {name!r}, which names no function: give "
            '"module:function" or "path/to/file.py:function".'
        )
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
