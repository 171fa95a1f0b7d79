"""The times of a step: plain, with every block run again, and with the products of blocks kept.

NOTE [ Times of a step ]

Rule 1. Whole steps are timed, without counting bytes or work. What a step takes beyond the plain
        one is what its blocks pay: their second runs, the hooks around them, the comparison, and
        the copies of products. So all of that is in the costs, and the predictions for these three
        steps are the times that were measured.
Rule 2. What blocks pay is divided among them by the times of their second runs, one by one; calls
        that are alike share the median of theirs. A clock that is read there waits for an
        accelerator, so steps in which it is read say nothing else. Within a block, products and
        other operators share its time by their counted work, of which keeping them saves the part
        that the step which keeps products shows.
Rule 3. The steps are run in turn, several times if they are short, and the shortest time of each
        counts, since other programs only make it longer. Times that are counted (without values)
        are always the same: once is enough.
Rule 4. The plain step, and the one that keeps products, are run only if the system has room for
        them. The plain step then takes what is left of the other one without its second runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from recoup._core.devices import is_accelerator
from recoup._core.tensors import is_without_values
from recoup.errors import ChangedError, ReplayError
from recoup.planning.blocks import Block
from recoup.planning.following import PlannedModel
from recoup.planning.planned_stages import each_alone
from recoup.planning.pricing import MeasuredCall, Selection, selections
from recoup.planning.ranks import largest_among_ranks
from recoup.planning.step import Step, now, seconds_of
from recoup.schedules import Way, constant

__all__ = ["Times", "medians_of_alike", "times_of", "with_times"]

_MOST_ROUNDS = 10
_ENOUGH_SECONDS = 2.0  # for all rounds
_SECONDS_OF_REGION = 60e-6  # of the hooks and the comparison of a call that runs again
_SECONDS_OF_PRODUCT = 60e-6  # of keeping a product: its copy, and giving it to the second run


class Times(NamedTuple):
    """The times of a step, in seconds.

    Args:
        plain: of the step that keeps all residuals.
        again: for each call, what its second run takes, with all that belongs to it.
        share: the part of its work by which a second run is shorter where values are kept; below 0
            where keeping them takes longer.
    """

    plain: float
    again: list[float]
    share: float


def times_of(
    step: Step,
    blocks: Sequence[Block],
    calls: Sequence[MeasuredCall],
    *,
    has_room: bool,
    plain_seconds: float | None = None,
) -> Times:
    """Time the steps of a model (See Rule 1).

    Args:
        step: the step.
        blocks: the names and modules of the blocks.
        calls: the measured calls of the blocks.
        has_room: whether the plain step may be run (See Rule 4).
        plain_seconds: the time of the plain step, if it is known from other blocks.
    """
    planned = PlannedModel.of(step, blocks, calls)
    runs: list[dict[int, float]] = []  # the seconds of second runs in each step that has them all

    @contextmanager
    def noted(index: int) -> Generator[None]:
        begin = now()
        try:  # a second run may end by an exception
            yield
        finally:
            runs[-1][index] = now() - begin  # the later run of a call counts

    def timed(index: int, run: str) -> AbstractContextManager[None]:
        return noted(index) if run in ("first", "again") else nullcontext()

    every_way: list[Way] = ["recompute"] * len(calls)
    again_all = constant([*every_way, "keep"])

    @contextmanager
    def recomputing() -> Generator[None]:
        runs.append({})
        with planned.followed(again_all, timed):
            yield

    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {"again": recomputing}
    if is_accelerator(step.device) and not is_without_values():
        ways = {"again": partial(planned.followed, again_all), "each": recomputing}
    most = [_most_of(call) for call in calls]
    kept = [len(selections(call)) or None for call in calls]
    if has_room and plain_seconds is None:
        ways["plain"] = nullcontext
    if has_room and any(kept):
        ways["products"] = partial(planned.followed, each_alone(kept))
    seconds = _in_turn(step, ways)
    shortest = [min((run[i] for run in runs if i in run), default=0.0) for i in range(len(calls))]
    again = medians_of_alike(calls, shortest)
    sum_again = sum(again)
    around = _SECONDS_OF_REGION * len(calls)
    if plain_seconds is None:
        plain_seconds = max(seconds["again"] - sum_again - around, sum_again)
    plain = seconds.get("plain", plain_seconds)
    scale = max(seconds["again"] - plain, 0.5 * sum_again) / sum_again if sum_again else 1.0
    again = [scale * each for each in again]
    whole = sum(map(_saved_by, most, calls, again))
    saved = whole - _SECONDS_OF_PRODUCT * sum(len(each.products) for each in most if each)
    if "products" in seconds:
        saved = seconds["again"] - seconds["products"]
    share = min(max(saved / whole, -1.0), 1.0) if whole else 0.0
    again = largest_among_ranks(step.model, again)
    return Times(plain, again, share)


def _most_of(call: MeasuredCall) -> Selection | None:
    """Return the most values that are kept together."""
    found = selections(call)
    return found[-1] if found else None


def _saved_by(selection: Selection | None, call: MeasuredCall, seconds: float) -> float:
    """Return the time that a second run is spared, by its counted work."""
    if selection is None or not call.counted_work:
        return 0.0
    return seconds * min(selection.saved_work / call.counted_work, 1.0)


def with_times(call: MeasuredCall, seconds: float, times: Times) -> MeasuredCall:
    """Return a call whose work is in seconds."""
    return replace(call, work=seconds, share=times.share)


def _in_turn(
    step: Step, ways: dict[str, Callable[[], AbstractContextManager[Any]]]
) -> dict[str, float]:
    """Return the shortest time of the step in each way (See Rule 3)."""
    seconds: dict[str, float] = {}
    spent = 0.0
    for _ in range(1 if is_without_values() else _MOST_ROUNDS):
        if spent > _ENOUGH_SECONDS:
            break
        for name, entered in list(ways.items()):
            try:
                with entered():
                    taken = seconds_of(step)
            except (ChangedError, ReplayError):
                if name != "products":
                    raise
                taken = math.inf
            (taken,) = largest_among_ranks(step.model, [taken])
            if not math.isfinite(taken):
                seconds.pop(name, None)
                del ways[name]  # a rehearsal of a plan that keeps products says why
                continue
            seconds[name] = min(taken, seconds.get(name, taken))
            spent += taken
    return seconds


def medians_of_alike(calls: Sequence[MeasuredCall], seconds: Sequence[float]) -> list[float]:
    """Return, for each call, the median of the times of all calls that are like it (See Rule 2)."""
    alike: defaultdict[object, list[float]] = defaultdict(list)
    keys = [(type(c.module), c.state_bytes, c.output_bytes, c.own_bytes) for c in calls]
    for key, taken in zip(keys, seconds, strict=True):
        alike[key].append(taken)
    return [median(alike[key]) for key in keys]
