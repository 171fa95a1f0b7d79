"""The recurrence over the segments of a chain: the fastest ways to solve each, by bytes.

A schedule is persistent if it keeps each state and tape until it has served its purpose: a stage is
taped when it is passed and stays taped until it is reversed, or the input of a segment is kept, the
segment is run without tapes, and later it is solved in the same way. So a choice for each segment
makes a schedule. The recurrence tries every choice for every segment, and looks up the parts that
the choice leaves. Bytes are not rounded. Of many solutions of a segment, some are left out.

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep neural
networks with limited memory" (2019).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from math import ceil, inf, sqrt
from operator import itemgetter
from typing import NamedTuple, TypeGuard

from recoup.schedules.actions import (
    Action,
    Advance,
    Drop,
    Invert,
    Keep,
    Load,
    Offload,
    Reverse,
    Schedule,
    Tape,
)
from recoup.schedules.choices import Chain, Choice

# How many times as many solutions are kept of a segment of the sweep: there are few of these.
_IN_SWEEP = 8

# The peak of a solution in bytes, its seconds, and the choice that begins it.
_Solution = tuple[int, float, Choice]


class Front(NamedTuple):
    """The fastest solutions of a segment, from the fewest bytes to the least time.

    Args:
        peaks: the peak of each in bytes, without rounding; rising.
        seconds: the time of each; falling.
        choices: the choice that begins each.
    """

    peaks: list[int]
    seconds: list[float]
    choices: list[Choice]

    def within(self, num_bytes: int) -> tuple[int, Choice]:
        """Return the peak and the choice of the fastest solution within a number of bytes."""
        place = bisect_right(self.peaks, num_bytes) - 1
        return self.peaks[place], self.choices[place]


Fronts = Mapping[tuple[int, int], Front]


def fronts_of(chain: Chain, most: int) -> Fronts:
    """Return the front of each segment of a chain.

    Args:
        chain: the chain.
        most: the most solutions that are kept of a segment that is run again. The one with the
            fewest bytes is always among them.
    """
    nothing = Front([chain.base], [0.0], [])
    fronts = {(index, index): nothing for index in range(chain.num_stages + 1)}
    for start, stop in chain.segments():
        found: list[_Solution] = []
        for choice in chain.choices(start, stop):
            later, earlier = fronts[choice.middle, stop], fronts[start, choice.earlier_stop]
            least = choice.seconds + later.seconds[-1] + earlier.seconds[-1]
            place = bisect_right(found, -least, key=lambda solution: -solution[1])
            bound = found[place][0] if place < len(found) else inf
            if solutions := _begun_by(choice, later, earlier, bound):
                # Of equals the last choice is taken: what runs again early in the sweep does so
                # late in backward, when there is room.
                found = _fastest(solutions + found)
        found = _thinned(found, most * _IN_SWEEP if stop == chain.num_stages else most)
        peaks, seconds, choices = map(list, zip(*found, strict=True))
        fronts[start, stop] = Front(peaks, seconds, choices)
    return fronts


def _begun_by(choice: Choice, later: Front, earlier: Front, bound: float) -> list[_Solution]:
    """Return the solutions that a choice begins, with peaks below a bound."""
    needs, keeps = choice.needs, choice.keeps
    peak = max(needs, keeps + later.peaks[0], earlier.peaks[0])
    at, beside = bisect_right(later.peaks, peak - keeps), bisect_right(earlier.peaks, peak)
    found: list[_Solution] = []
    while peak < bound:
        seconds = choice.seconds + later.seconds[at - 1] + earlier.seconds[beside - 1]
        found.append((int(peak), seconds, choice))
        # More bytes serve once one of the parts has a faster solution within them.
        next_later = keeps + later.peaks[at] if at < len(later.peaks) else inf
        next_earlier = earlier.peaks[beside] if beside < len(earlier.peaks) else inf
        peak = min(next_later, next_earlier)
        if peak == inf:
            break
        at += next_later == peak
        beside += next_earlier == peak
    return found


def _fastest(solutions: list[_Solution]) -> list[_Solution]:
    """Return those solutions than which none with as few bytes is as fast, by bytes."""
    found: list[_Solution] = []
    least = inf
    for solution in sorted(solutions, key=itemgetter(0, 1)):
        if solution[1] < least:
            least = solution[1]
            found.append(solution)
    return found


def _thinned(solutions: list[_Solution], most: int) -> list[_Solution]:
    """Return the first solution, and the fastest in each of `most - 1` parts of the bytes."""
    if len(solutions) <= most:
        return solutions
    first, last = solutions[0][0], solutions[-1][0]
    kept: dict[int, _Solution] = {}
    for solution in reversed(solutions):
        share = (solution[0] - first) / (last - first)  # small budgets get finer parts
        kept.setdefault(ceil((most - 1) * sqrt(share)), solution)
    kept[0] = solutions[0]
    return sorted(kept.values(), key=itemgetter(0))


# -- building a schedule ---------------------------------------------------------------------------


class _Part(NamedTuple):
    """A segment that is to be solved, whose input is the working state.

    Args:
        start: its first stage.
        stop: one past its last stage.
        num_bytes: the bytes that its solution may take.
        is_kept: whether its input is kept.
        stays: whether its input, if it is kept, stays kept.
        returns: whether its input is to be the working state again after it is reversed.
    """

    start: int
    stop: int
    num_bytes: int
    is_kept: bool = False
    stays: bool = False
    returns: bool = False


def persistent(fronts: Fronts, num_stages: int, num_bytes: int) -> Schedule:
    """Build the fastest schedule of a chain within a number of bytes.

    Args:
        fronts: the front of each segment.
        num_stages: the number of stages of the chain.
        num_bytes: the bytes.
    """
    actions: list[Action] = []
    waiting: list[Action | _Part] = [_Part(0, num_stages, num_bytes)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _Part):
            waiting += reversed(_begin(item, fronts))
        elif _is_plain(item) and actions and _is_plain(before := actions[-1]):
            actions[-1] = Advance(before.start, item.stop)
        else:
            actions.append(item)
    return Schedule(num_stages, tuple(actions), name="optimal")


def _is_plain(action: Action) -> TypeGuard[Advance]:
    """Whether an action runs stages and keeps none of their results."""
    return isinstance(action, Advance) and not action.results


def _begin(part: _Part, fronts: Fronts) -> list[Action | _Part]:
    start = part.start
    back: list[Action | _Part] = [Load(start), Drop(start)] if part.returns else []
    if start == part.stop:
        return [Keep(start), *back] if part.returns else []
    peak, choice = fronts[start, part.stop].within(part.num_bytes)
    later = _Part(choice.middle, part.stop, peak - choice.keeps)
    drop: list[Action | _Part] = [Drop(start)] if part.is_kept else []
    keep: list[Action | _Part] = [] if part.is_kept else [Keep(start)]
    match choice.kind:
        case "invert":
            inverse = (Invert(start), Reverse(start))
            return [Advance(start, start + 1), later._replace(returns=True), *inverse]
        case "tape":
            tapes = [Tape(index, variant) for index, variant in choice.of_stages(start)]
            reverses = [Reverse(tape.index) for tape in reversed(tapes)]
            if part.returns:
                return [*keep, *tapes, later, *reverses, *back]
            return [*([] if part.stays else drop), *tapes, later, *reverses]
        case "results":
            runs = [Advance(index, index + 1, kept) for index, kept in choice.of_stages(start)]
            tapes = [Tape(run.start) for run in runs]
            reverses = [Reverse(run.start) for run in reversed(runs)]
            stays = part.stays or part.returns
            loaded = [Load(start), *([] if stays else [Drop(start)])]
            return [*keep, *runs, later, *loaded, *tapes, *reverses, *back]
        case "keep":
            earlier = _Part(start, choice.middle, peak, True, part.stays or part.returns)
            return [*keep, Advance(start, choice.middle), later, Load(start), earlier, *back]
        case "offload":
            stays = part.stays or part.returns
            again: list[Action | _Part] = [Keep(start)] if stays else []
            earlier = _Part(start, choice.middle, peak, stays, stays)
            away = (Offload(start), Advance(start, choice.middle))
            return [*drop, *away, later, Load(start), Drop(start), *again, earlier, *back]
