"""Cases that take two processes: how a test starts them, and what their workers share.

A worker is a module of this folder with a table `CASES` of functions of the rank, each of which
asserts what it promises, and ends in ``report(CASES)``. It runs as
``python -m tests.neighbours.NAME RANK FOLDER PREFIX`` and leaves a file of JSON for each rank.
"""

from __future__ import annotations

import json
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
RIGHT, SKIPPED = "right", "skipped"
_MOST_SECONDS = float(os.environ.get("RECOUP_TEST_SECONDS", "180"))
_ROOT = Path(__file__).parents[2]

Case = Callable[[int], Any]


# -- for a test ------------------------------------------------------------------------------------


def outputs_of(
    name: str, arguments: Iterable[Iterable[str]], most_seconds: float | None = None
) -> list[str]:
    """What the worker `name` writes, run at once in a process for each list of arguments."""
    command = [sys.executable, "-m", f"tests.neighbours.{name}"]
    workers = [
        subprocess.Popen(
            [*command, *each], cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for each in arguments
    ]
    try:
        said = [worker.communicate(timeout=most_seconds) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    ends = [worker.returncode for worker in workers]
    assert not any(ends), "\n".join(error[-3000:] for _, error in said)
    return [output for output, _ in said]


def found_by(name: str, folder: Path, prefix: str = "") -> list[dict[str, str]]:
    """What each rank of the worker `name` found, for cases that begin with `prefix`."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch is built without gloo")
    arguments = [[str(rank), str(folder), prefix] for rank in range(NUM_RANKS)]
    outputs_of(name, arguments, _MOST_SECONDS)
    return [json.loads(_file(folder, rank).read_text("utf-8")) for rank in range(NUM_RANKS)]


# -- for a worker ----------------------------------------------------------------------------------


def report(cases: Mapping[str, Case]) -> None:
    """Be a worker: meet the other, run the cases with the rank, and write down what each said."""
    rank, folder, prefix = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=_MOST_SECONDS / 3),
    )
    found = {name: _said(case, rank) for name, case in cases.items() if name.startswith(prefix)}
    dist.barrier()
    _file(folder, rank).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()
    # gloo's threads may abort the interpreter's own exit.
    os._exit(0)


def is_refused(rank: int, run: Callable[..., Any], words: str, args: Iterable[Any] = ()) -> None:
    with pytest.raises((RuntimeError, ValueError), match=words):
        run(rank, *args)


def _said(case: Case, rank: int) -> str:
    try:
        case(rank)
    except pytest.skip.Exception:
        return SKIPPED
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - it is what the test shows
        return traceback.format_exc()
    return RIGHT


def _file(folder: Path, rank: int) -> Path:
    return folder / f"found-{rank}.json"


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
