"""The points of a curve, each measured in a fresh process by `recoup.memory.worker`."""

from __future__ import annotations

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

__all__ = ["WITHIN_WORKER", "Point", "Request", "build_name", "measure_point"]

WITHIN_WORKER = "RECOUP_WITHIN_WORKER"
"""Environment variable that a worker finds set, so that it never starts workers itself."""

# With these, glibc returns each block above 64 KiB to the system as soon as it is freed, which
# makes resident memory meaningful. The page faults that this causes make times meaningless.
_GIVE_MEMORY_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_ARENA_MAX": "1",
}


@dataclass(frozen=True, slots=True)
class Request:
    """The request for one point, which a worker receives as JSON."""

    build: str
    depth: int
    memory: str | int
    device: str
    repeats: int
    num_threads: int
    resident: bool


@dataclass(frozen=True, slots=True)
class Point:
    """The memory and time of a training step at one depth, in one memory mode.

    Args:
        depth: as given to the builder.
        memory: as given to the builder.
        peak_bytes: highest number of bytes alive while a step ran, beyond what was alive before.
        held_bytes: bytes alive after the step, beyond what was alive before.
        seconds: wall time of the fastest step; None if time was not taken.
        cpu_seconds: least processor time of a step; None if time was not taken.
        resident_bytes: peak of the resident memory of a separate process, beyond what was resident
            before the step; None if not requested.
    """

    depth: int
    memory: str | int
    peak_bytes: int
    held_bytes: int
    seconds: float | None = None
    cpu_seconds: float | None = None
    resident_bytes: int | None = None


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
        >>> build_name("chain.py:build")
        'chain.py:build'
        >>> build_name(asdict)
        'dataclasses:asdict'
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
    if getattr(sys.modules.get(module), name, None) is not build:
        raise ValueError(
            f"`build` is {name} of {module}, which another process cannot import, as each point is "
            "measured in a fresh one. Define a function at the top level of a module, and give "
            'that or its name, "module:function".'
        )
    if module != "__main__":
        return f"{module}:{name}"
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None or not Path(script).is_file():
        raise ValueError(
            f"`build` is {name} of an interactive session, which another process cannot import. "
            'Put it into a file, and give "path/to/file.py:function".'
        )
    return f"{Path(script).resolve()}:{name}"


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
        **(_GIVE_MEMORY_BACK if request.resident else {}),
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
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with code {returncode}."
