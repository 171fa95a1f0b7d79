"""Cases that take processes of their own: how a test starts them, and what their workers share.

A worker is a module of this folder. One of two processes has a table `CASES` of functions of the
rank, each of which asserts what it promises, and ends in ``run_cases(CASES)``. It runs as
``python -m tests.neighbours.NAME RANK FOLDER PREFIX``, and fails if a case does.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

NUM_RANKS = 2
MOST_SECONDS = float(os.environ.get("RECOUP_TEST_SECONDS", "180"))

Case = Callable[[int], Any]


def run_worker(
    name: str, arguments: Iterable[Iterable[str]] = ((),), most_seconds: float | None = None
) -> None:
    """Run the worker `name` at once in a process for each list of arguments; none may fail."""
    command = [sys.executable, "-m", f"tests.neighbours.{name}"]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    root = Path(__file__).parents[2]
    workers = [subprocess.Popen([*command, *each], cwd=root, **streams) for each in arguments]
    try:
        said = [worker.communicate(timeout=most_seconds)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert not any(worker.returncode for worker in workers), "\n".join(e[-3000:] for e in said)


def run_cases(cases: Mapping[str, Case]) -> None:
    """Be a worker: meet the other, and run the cases with the rank."""
    rank, folder, prefix = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=MOST_SECONDS / 3),
    )
    chosen, wrong = [name for name in cases if name.startswith(prefix)], []
    for name in chosen:
        try:
            cases[name](rank)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - it is what the test shows
            wrong.append(f"{name}, rank {rank}: {traceback.format_exc()}")
    dist.barrier()
    sys.stderr.write("\n".join(wrong))
    sys.stderr.flush()
    dist.destroy_process_group()
    # gloo's threads may abort the interpreter's own exit.
    os._exit(bool(wrong) or not chosen)


def is_refused(rank: int, run: Callable[..., Any], words: str, args: Iterable[Any] = ()) -> None:
    with pytest.raises((RuntimeError, ValueError), match=words):
        run(rank, *args)


def half(x: Any, rank: int) -> Any:
    """The rows of a batch, or of several, that a rank has."""
    return x.chunk(NUM_RANKS)[rank] if isinstance(x, Tensor) else tuple(half(y, rank) for y in x)


def sharded(model: Any, parts: Iterable[nn.Module] = (), **settings: Any) -> Any:
    """A model under FSDP2: parts of it, and the rest."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for part in parts:
        fully_shard(part, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def full(tensor: Any) -> Tensor:
    """A tensor, of which a rank may hold a part."""
    found = tensor.detach()
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    return found.to_dense() if found.is_sparse else found


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {n.removeprefix("module."): full(p.grad) for n, p in named if p.grad is not None}


def apart(got: Mapping[str, Any], want: Mapping[str, Any]) -> float:
    """The largest difference of tensors of some names; infinite where the names differ."""
    if got.keys() != want.keys():
        return math.inf
    return max(float((full(got[name]) - full(want[name])).abs().max()) for name in want)


def of_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(found, value)
    return found
