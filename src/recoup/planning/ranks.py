"""Ranks that hold parts of one model (FSDP2), and so have to run the same steps.

NOTE [ One decision on all ranks ]

Rule 1. The collectives of one rank wait for those of the others. A rank that rehearsed a different
        plan, or one plan more than the others, would wait forever.
Rule 2. Every decision that depends on measurements uses the largest number that any rank measured.
        So all ranks decide alike, and a plan keeps to its budget on all of them.
Rule 3. The backend may free a buffer in a thread of its own, a moment after the collective has
        ended. The allocator does not report this, and the buffer counts until the step ends.
        So a rehearsal that exceeded the budget is repeated a few times, and the least peak counts.
Rule 4. A block whose forward has collectives (tensor parallelism) repeats them where it runs again.
        Their time is in the measured times of the block, if there is a network to measure. FSDP2
        gathers outside of blocks, for backward in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from recoup.schedules import Cost


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of `model`."""
    return bool(_meshes_of(model))


def largest_among_ranks(model: nn.Module, numbers: Sequence[float]) -> list[float]:
    """Return the largest of each of `numbers` among the ranks that hold parts of `model`.

    Args:
        model: the model; if it is not sharded, `numbers` are returned.
        numbers: the numbers, equally many on each rank.
    """
    meshes = _meshes_of(model)
    if not meshes:
        return list(numbers)
    found = torch.tensor(list(numbers), dtype=torch.float64, device="cpu")
    for mesh in meshes:
        moved = found.to(mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(moved, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        found = moved.cpu()
    return [float(number) for number in found]


def on_any_rank(model: nn.Module, condition: bool) -> bool:
    """Whether a condition holds on any of these ranks."""
    return largest_among_ranks(model, [float(condition)]) != [0.0]


def largest_costs_among_ranks(model: nn.Module, costs: Sequence[Cost]) -> list[Cost]:
    """Return the largest costs among the ranks that hold parts of `model`.

    If the ranks found different variants or results of stages, all of them are left out.
    """
    found = [tuple(costs)]
    for mesh in _meshes_of(model):
        for dim in range(mesh.ndim):
            group = mesh.get_group(dim)
            gathered: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, found, group=group)
            found = [each for several in gathered for each in several]
    if len({tuple((len(c.variants), len(c.results)) for c in each) for each in found}) > 1:
        found = [tuple(replace(c, variants=(), results=()) for c in each) for each in found]
    if len(found) > 1:  # one may end a run where it need not, or hold its input, on one rank alone
        found = [tuple(map(_with_tape_again, each)) for each in found]
    return list(_largest(found))


def _with_tape_again(cost: Cost) -> Cost:
    """Return a cost with the tape that a run in backward makes, also where it is the whole one."""
    tape = cost.tape_again
    stopped_run_bytes = tape.run_bytes(goes_on=False)
    return replace(cost, again=replace(tape, stopped_run_bytes=stopped_run_bytes))


def _largest(values: Sequence[Any]) -> Any:
    """Return the largest of numbers; of tuples and dataclasses, number by number."""
    first = values[0]
    if isinstance(first, tuple):
        return tuple(map(_largest, zip(*values, strict=True)))
    if is_dataclass(first):
        own = {f.name: [getattr(value, f.name) for value in values] for f in fields(first)}
        return replace(cast("Any", first), **{name: _largest(each) for name, each in own.items()})
    return max(values) if type(first) in (int, float) else first


def _meshes_of(model: nn.Module) -> list[Any]:
    """Return the meshes of the parameters that are DTensors, in the order of the parameters."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return list({mesh: None for mesh in meshes if mesh is not None})
