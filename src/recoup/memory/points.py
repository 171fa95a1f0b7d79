"""The points of a curve, each measured in a fresh process by `recoup.memory.worker`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recoup.errors import RecoupError

__all__ = ["WITHIN_WORKER", "Point", "Request", "measure_point"]

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
        resident_bytes: the peak of the resident memory of another process that runs the step,
            beyond what was resident before it; None unless `curve` was called with
            ``resident=True``.

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
    resident_bytes: int | None = None


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
