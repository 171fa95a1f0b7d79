"""Cases that take two processes: how a test starts them, and how a worker says what it found.

A worker is a module of this folder that ends in ``report(cases)``. It runs as
``python -m tests.neighbours.NAME RANK FOLDER`` and leaves a file of JSON for each rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

NUM_RANKS = 2
_ROOT = Path(__file__).parents[2]


def found_by(name: str, folder: Path, *more: str) -> list[dict[str, Any]]:
    """Run the worker `name` in two processes, and return what each rank found.

    Args:
        name: of its module.
        folder: for its files.
        more: further arguments of its command line.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    command = [sys.executable, "-m", f"tests.neighbours.{name}"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(folder), *more],
            cwd=_ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        said = [worker.communicate(timeout=180)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    ends = [worker.returncode for worker in workers]
    assert ends == [0] * NUM_RANKS, "\n".join(text[-3000:] for text in said)
    return [json.loads(_file(folder, rank).read_text("utf-8")) for rank in range(NUM_RANKS)]


def both(found: list[dict[str, Any]], case: str) -> list[Any]:
    """What the ranks found, which both did."""
    return [rank[case] for rank in found]


def furthest(found: list[dict[str, Any]], case: str) -> float:
    """The largest difference of any rank; an error, if it was one."""
    values = both(found, case)
    errors = [value for value in values if isinstance(value, str)]
    assert errors == [], errors
    return max(values)


def said(case: Callable[..., Any], *args: Any) -> Any:
    """What a case finds, or the error that it ends with."""
    try:
        return case(*args)
    except (ReferenceError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def report(cases: Callable[[int], dict[str, Any]]) -> None:
    """Be a worker: meet the other, run `cases` with the rank, and write down what they return."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=60),
    )
    found = cases(rank)
    dist.barrier()
    _file(folder, rank).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()
    # gloo's threads may abort the interpreter's own exit.
    os._exit(0)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"found-{rank}.json"
