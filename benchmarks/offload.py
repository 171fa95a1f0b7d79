"""A chain whose states wait elsewhere: peak bytes and time beside keeping them in memory.

`RECOUP_QUICK=1 python benchmarks/run.py offload` is a small size, in seconds. On the CPU states go
to a file in RECOUP_FOLDER (by default that of temporary files), else to host memory too.
"""

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from couplings import peak_and_held
from timing import in_turn, ratio, seconds_of
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import recoup
from recoup.schedules import Cost, Schedule, offloaded, revolve, simulate

QUICK = bool(os.environ.get("RECOUP_QUICK"))
FOLDER = os.environ.get("RECOUP_FOLDER", tempfile.gettempdir())
NUM_BLOCKS, WIDE, ROWS = (8, 64, 256) if QUICK else (64, 512, 2048)
ROUNDS = 2 if QUICK else 5


class Block(nn.Module):
    """Two products with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.Linear(WIDE, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class saved_in_turn:  # noqa: N801 - it stands where torch's save_on_cpu does
    """As `save_on_cpu` does, with a file: a tensor is written where it is saved, and read where
    backward asks for it, while nothing else runs."""

    def __init__(self, folder: str) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> object:
        if isinstance(tensor._base, nn.Parameter) or tensor.numel() < WIDE * ROWS:
            return tensor
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(memoryview(tensor.detach().cpu().contiguous().numpy()).cast("B"))
        return place, tensor.shape, tensor.device

    def _unpack(self, packed: object) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        place, shape, device = packed
        tensor = torch.empty(shape)
        self._file.seek(place)
        self._file.readinto(memoryview(tensor.numpy()).cast("B"))
        return tensor.to(device)


class Way(NamedTuple):
    """A way to train the chain."""

    name: str
    schedule: Schedule | None  # None for the modules as they are
    around: Callable[[], AbstractContextManager]


def ways(device: str) -> list[Way]:
    """Return the ways; the first one keeps the state before each block in memory."""
    kept = revolve(NUM_BLOCKS, NUM_BLOCKS)
    found = [
        Way("states in memory", kept, nullcontext),
        Way("states in a file, in turn", kept, lambda: saved_in_turn(FOLDER)),
        Way("recoup, states in a file", offloaded(NUM_BLOCKS, FOLDER), nullcontext),
        Way(
            "recoup, every 8th state in a file", offloaded(NUM_BLOCKS, FOLDER, every=8), nullcontext
        ),
        Way("all residuals in memory", None, nullcontext),
        Way("recoup.offloading, all residuals", None, lambda: recoup.offloading(to=FOLDER)),
    ]
    if device != "cpu":
        found[2:2] = [
            Way("save_on_cpu, states", kept, lambda: torch.autograd.graph.save_on_cpu(True)),
            Way("recoup, states in host memory", offloaded(NUM_BLOCKS), nullcontext),
            Way("recoup.offloading to host memory, all residuals", None, recoup.offloading),
        ]
    return found


def rows(device: str) -> list[dict]:
    """Measure each way: its peak, what `simulate` says of it, and its time, all in turn."""
    torch.manual_seed(0)
    blocks = [Block().to(device) for _ in range(NUM_BLOCKS)]
    x = torch.randn(ROWS, WIDE, device=device)
    steps = [(way, _step(way, blocks, x)) for way in ways(device)]
    costs = _costs(blocks[0], x, device)
    found, wanted = [], None
    for way, step in steps:
        step()
        gradients = [p.grad.clone() for block in blocks for p in block.parameters()]
        wanted = wanted or gradients
        assert all(map(torch.equal, gradients, wanted)), f"{way.name}: other gradients"
        del gradients
        gc.collect()
        simulated = None
        if way.schedule is not None and way.around is nullcontext:
            in_flight = 2 * costs[0].state_bytes
            simulated = simulate(way.schedule, costs=costs, in_flight_bytes=in_flight).peak_bytes
        peak = peak_and_held(step, device)[0]
        found.append({"name": way.name, "peak_bytes": peak, "simulated_bytes": simulated})
        if simulated is not None:
            # Output, loss and gradients of the chain belong to the caller: as where states stay.
            found[-1]["simulated_bytes"] += found[0]["peak_bytes"] - first_simulated(costs)
        print("  ", found[-1], flush=True)
    taken = in_turn({way.name: step for way, step in steps}, ROUNDS, device)
    first, plain = taken["states in memory"], taken["all residuals in memory"]
    for row in found:
        own = taken[row["name"]]
        row["seconds"] = min(own)
        row["over_states_in_memory"] = ratio(own, first)
        row["over_all_in_memory"] = ratio(own, plain)
    return found


def first_simulated(costs: list[Cost]) -> int:
    """Return what `simulate` says of the chain whose states stay in memory."""
    return simulate(revolve(NUM_BLOCKS, NUM_BLOCKS), costs=costs).peak_bytes


def _step(way: Way, blocks: list[nn.Module], x: Tensor) -> Callable[[], None]:
    chain = nn.Sequential(*blocks)
    if way.schedule is not None:
        chain = recoup.Sequential(*blocks, memory=way.schedule)

    def step() -> None:
        for block in blocks:
            block.zero_grad(set_to_none=False)  # not part of what is compared
        with way.around():
            loss = chain(x * 1).square().mean()
        loss.backward()

    step()
    return step


def _costs(block: nn.Module, x: Tensor, device: str) -> list[Cost]:
    """Return the costs of the chain: its states, its tapes, and what a run has beyond them."""
    state = x.numel() * x.element_size()
    # Inputs of both products and of the activation; beyond them, three gradients at a time.
    cost = Cost(
        seconds=seconds_of(lambda: block(x), device),
        state_bytes=state,
        tape_bytes=3 * state,
        run_bytes=2 * state,
        tape_run_bytes=4 * state,
        reverse_bytes=3 * state,
        offload_seconds=0.0,
    )
    return [cost] * NUM_BLOCKS


def bandwidth() -> dict:
    """Return the bytes a second that a file in the folder takes and gives, by one thread."""
    data = bytearray(1 << 26)
    with tempfile.TemporaryFile(dir=FOLDER, buffering=0) as file:
        start = time.perf_counter()
        file.write(data)
        written = time.perf_counter()
        file.seek(0)
        file.readinto(data)
        end = time.perf_counter()
    return {
        "written_bytes_per_second": len(data) / (written - start),
        "read_bytes_per_second": len(data) / (end - written),
    }


def suite(device: str) -> Iterator[tuple[str, object]]:
    yield "shape", {"blocks": NUM_BLOCKS, "units": WIDE, "rows": ROWS}
    yield "file", bandwidth()
    yield "chain", rows(device)
