"""Ranks that hold parts of one model (FSDP2), and so have to run the same steps.

NOTE [ One decision on all ranks ]

Rule 1. The collectives of one rank wait for those of the others. A rank that rehearsed a different
        plan, or one plan more than the others, would wait forever.
Rule 2. Every decision that depends on measurements uses the largest number that any rank measured.
        So all ranks decide alike, and a plan keeps to its budget on all of them.
Rule 3. The backend may free a buffer in a thread of its own, a moment after the collective has
        ended. The allocator does not report this, and the buffer counts until the step ends.
        So a rehearsal that exceeded the budget is repeated a few times, and the least peak counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from recoup.schedules import Cost

__all__ = ["is_sharded", "largest_among_ranks", "largest_costs_among_ranks"]

T = TypeVar("T")


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of `model`."""
    return bool(_meshes_of(model))


def largest_among_ranks(model: nn.Module, numbers: Sequence[float]) -> list[float]:
    """Return the largest of each of `numbers` among the ranks that hold parts of `model`.

    Args:
        model: the model; if it is not sharded, `numbers` are returned.
        numbers: the numbers, equally many on each rank.
    """
    found = torch.tensor(list(numbers), dtype=torch.float64, device="cpu")
    for mesh in _meshes_of(model):
        moved = found.to(mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(moved, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        found = moved.cpu()
    return [float(number) for number in found]


def largest_costs_among_ranks(model: nn.Module, costs: Sequence[Cost]) -> list[Cost]:
    """Return the largest costs among the ranks that hold parts of `model`.

    If the ranks found different variants of stages, all variants are left out.
    """
    if not is_sharded(model):
        return list(costs)
    num = len(list(_numbers_of(tuple(costs))))
    most, least = largest_among_ranks(model, [num, -num])
    alike = tuple(costs) if most == -least else tuple(replace(c, variants=()) for c in costs)
    largest = iter(largest_among_ranks(model, list(_numbers_of(alike))))
    return list(_with_numbers(alike, largest))


def _meshes_of(model: nn.Module) -> list[Any]:
    """Return the meshes of the parameters that are DTensors, in the order of the parameters."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return list({mesh: None for mesh in meshes if mesh is not None})


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers_of(value: object) -> Iterator[float]:
    if isinstance(value, (int, float)) and _is_number(value):
        yield value
    elif isinstance(value, tuple):
        for part in cast("tuple[object, ...]", value):
            yield from _numbers_of(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _numbers_of(getattr(value, field.name))


def _with_numbers(value: T, numbers: Iterator[float]) -> T:
    made: Any = value
    if _is_number(value):
        made = type(made)(next(numbers))
    elif isinstance(value, tuple):
        made = tuple(_with_numbers(part, numbers) for part in cast("tuple[Any, ...]", made))
    elif is_dataclass(value):
        parts = {f.name: _with_numbers(getattr(value, f.name), numbers) for f in fields(value)}
        made = replace(made, **parts)
    return made
