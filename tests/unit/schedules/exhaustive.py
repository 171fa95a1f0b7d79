"""Every schedule that the planner may choose from, by brute force, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from recoup.errors import ScheduleError
from recoup.schedules import (
    Action,
    Advance,
    Cost,
    Drop,
    Invert,
    Keep,
    Load,
    Offload,
    Reverse,
    Schedule,
    Simulation,
    Tape,
    simulate,
)

Actions = tuple[Action, ...]


def every_schedule(costs: Sequence[Cost]) -> Iterator[Schedule]:
    """Every persistent schedule with every further choice, also those that the costs rule out."""
    for actions in _sweep(costs, 0, returns=False):
        yield Schedule(len(costs), actions, name="every")


def every_simulation(costs: Sequence[Cost]) -> list[Simulation]:
    """What those cost that are not ruled out."""
    found = []
    for schedule in every_schedule(costs):
        try:
            found.append(simulate(schedule, costs=costs))
        except ScheduleError:
            continue
    return found


def _sweep(costs: Sequence[Cost], start: int, *, returns: bool) -> Iterator[Actions]:
    """All ways to solve the stages from `start` on in the sweep.

    With `returns`, ``x_start`` is the working state again in the end, for an inverse to begin at.
    """
    back: Actions = (Load(start), Drop(start)) if returns else ()
    if start == len(costs):
        yield (Keep(start), *back) if returns else ()
        return
    cost = costs[start]
    keep: Actions = (Keep(start),) if returns else ()
    for rest in _sweep(costs, start + 1, returns=False):
        for variant in range(len(cost.variants) + 1):
            yield (*keep, Tape(start, variant), *rest, Reverse(start), *back)
    if cost.is_invertible:
        for rest in _sweep(costs, start + 1, returns=True):
            yield (Advance(start, start + 1), *rest, Invert(start), Reverse(start))
    for split in range(start + 1, len(costs)):
        stages = range(start, split)
        load: Actions = (Load(start),) if returns else (Load(start), Drop(start))
        tapes = (*map(Tape, stages), *map(Reverse, reversed(stages)))
        after = costs[split]
        holds = after.is_linked and not after.is_invertible and after.offload_seconds is None
        for numbers in product(*(range(len(costs[index].results) + 1) for index in stages)):
            kept = [
                costs[index].kept(number) for index, number in zip(stages, numbers, strict=True)
            ]
            if any(each.holds_output for each in (kept if not holds else kept[:-1])):
                continue
            runs = [Advance(index, index + 1, numbers[index - start]) for index in stages]
            for later in _sweep(costs, split, returns=False) if any(numbers) else ():
                yield (Keep(start), *runs, *later, *load, *tapes, *back)
        for later in _sweep(costs, split, returns=False):
            for earlier in _again(costs, start, split, kept=True, stays=returns):
                yield (Keep(start), Advance(start, split), *later, Load(start), *earlier, *back)
            if cost.offload_seconds is None:
                continue
            away = (Offload(start), Advance(start, split), *later, Load(start), Drop(start), *keep)
            for earlier in _again(costs, start, split, kept=returns, stays=returns):
                yield (*away, *earlier, *back)


def _again(
    costs: Sequence[Cost], start: int, stop: int, *, kept: bool, stays: bool
) -> Iterator[Actions]:
    """All ways to solve stages in backward, from the working state ``x_start``."""
    drop: Actions = (Drop(start),) if kept else ()
    keep: Actions = () if kept else (Keep(start),)
    rests = _again(costs, start + 1, stop, kept=False, stays=False) if start + 1 < stop else ((),)
    for rest in rests:
        yield (*(() if stays else drop), Tape(start), *rest, Reverse(start))
    for split in range(start + 1, stop):
        for later in _again(costs, split, stop, kept=False, stays=False):
            for earlier in _again(costs, start, split, kept=True, stays=stays):
                yield (*keep, Advance(start, split), *later, Load(start), *earlier)
            if costs[start].offload_seconds is None:
                continue
            back = (Keep(start),) if stays else ()
            away = (Offload(start), Advance(start, split), *later, Load(start), Drop(start), *back)
            for earlier in _again(costs, start, split, kept=stays, stays=stays):
                yield (*drop, *away, *earlier)
