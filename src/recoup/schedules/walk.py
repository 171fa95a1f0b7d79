"""Walks: the state of a chain while a schedule is executed, for `simulate` and `trace`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from recoup._arguments import is_whole
from recoup.schedules.actions import (
    Action,
    Advance,
    Drop,
    Invert,
    Keep,
    Load,
    Offload,
    Reverse,
    Tape,
)
from recoup.schedules.costs import Cost, Results, SelectiveTape


class Impossible(Exception):  # noqa: N818  # it is not one until a caller has named the action
    """The reason why an action cannot be done where it stands."""


class Sizes(Cost):
    """The cost of a stage of which only the sizes are known: it rules out no action."""

    __slots__ = ()

    @classmethod
    def of(cls, state_bytes: int, tape_bytes: int) -> Sizes:
        """Return the cost of a stage with these sizes."""
        return cls(0.0, state_bytes, tape_bytes, is_invertible=True, offload_seconds=0.0)

    def __post_init__(self) -> None:
        """Check nothing: the sizes were checked, and a tape may be smaller than a state."""

    def tape(self, variant: int) -> SelectiveTape:
        """Return the whole tape, whatever the number."""
        return SelectiveTape(self.tape_bytes, 0.0)

    def kept(self, number: int) -> Results:
        """Return results of no size, whatever the number."""
        return Results(0, 0.0)


class Walk:
    """A walk through a schedule: counts memory and time action by action.

    The last state takes no bytes if it belongs to the caller.
    """

    def __init__(self, costs: Sequence[Cost], last_bytes: int = 0) -> None:
        self.costs = costs
        self.num_stages = len(costs)
        self.state_bytes = [*(cost.state_bytes for cost in costs), last_bytes]
        self.working: int | None = 0
        self.kept: set[int] = set()
        self.offloaded: set[int] = set()
        self.tapes: dict[int, SelectiveTape] = {}
        self.results: dict[int, Results] = {}  # that the sweep has kept
        self.remaining = self.num_stages  # the first stages, which are not reversed yet
        self.swept = False  # whether the working state has been x_n
        self.in_backward = False
        self.forwards = [0] * self.num_stages
        self.num_inverses = 0
        self.seconds = 0.0
        self.counted = [0] * (self.num_stages + 1)  # bytes of each state that are in `held` now
        self.held = 0
        self.cached = 0  # bytes of `held` until the sweep has ended
        self.whole_run = 0  # the peak of the latest run in backward if it goes on to its output
        self.peak = self.peak_states = self.peak_tapes = 0
        self.host = self.peak_host = 0
        self._recount(0)

    def step(self, action: Action) -> None:
        """Do one action, or raise `Impossible`."""
        if self.swept and not self.in_backward and action != Keep(self.num_stages):
            self.in_backward = True
            self.held -= self.cached
            self._work(None)
        self._check_place(action)
        if not isinstance(action, Drop):
            goes_on = not isinstance(action, Load | Reverse)
            self.peak, self.whole_run = max(self.peak, goes_on * self.whole_run), 0
        match action:
            case Keep(index):
                self._check_can_leave(index)
                self.kept.add(index)
            case Offload(index):
                self._check_can_leave(index)
                self._offload(index)
            case Drop(index):
                self._check_is_there(index)
                self._drop(index)
            case Load(index):
                self._check_is_there(index)
                self._work(index)
            case Advance(start, stop, results):
                self._check_runs(start, stop, results)
                for index in range(start, stop):
                    kept = self.costs[index].kept(results)
                    self._enter(index, self.costs[index].run_bytes + kept.num_bytes)
                    if results:
                        self.results[index] = kept
                        self.held += kept.num_bytes
                    if not self.in_backward:
                        self.cached += self.costs[index].cached_bytes
                        self.held += self.costs[index].cached_bytes
                    self._work(self._output(index))
            case Tape(index, variant):
                self._check_tapes(index, variant)
                cost = self.costs[index]
                tape = cost.tape_again if self.in_backward else cost.tape(variant)
                taped = self.results[index].taped_bytes if index in self.results else 0
                if self.in_backward:
                    self.whole_run = self.held + tape.tape_run_bytes - taped
                self._enter(index, tape.run_bytes(goes_on=not self.in_backward) - taped)
                self.forwards[index] += variant > 0  # backward runs it once more, in part
                self._tape(index, tape, self._output(index))
            case Invert(index):
                self._check_inverts(index)
                self._invert(index)
            case Reverse(index):
                self._reverse(index)
        self.peak = max(self.peak, self.held)
        self.peak_states = max(self.peak_states, len(self.kept))
        self.peak_tapes = max(self.peak_tapes, len(self.tapes))

    def _check_place(self, action: Action) -> None:
        if not isinstance(cast("object", action), Action):
            raise Impossible("it is no action of recoup.schedules")
        last = self.num_stages if isinstance(action, Keep | Drop | Load) else self.num_stages - 1
        is_run = isinstance(action, Advance)
        first, end = (action.start, action.stop - 1) if is_run else (action.index, action.index)
        if not (is_whole(first, 0, last) and is_whole(end, first, last)):
            raise Impossible(f"a chain of {self.num_stages} stages has no such stage or state")
        if not self.swept and isinstance(action, Load | Invert | Reverse):
            raise Impossible(
                f"it belongs to backward, but the sweep has not reached x_{self.num_stages}"
            )

    def _check_works_on(self, index: int) -> None:
        """Raise unless a state is the working state."""
        if self.working == index:
            return
        needed = f"it needs the working state x_{index}, "
        if self.working is not None:
            raise Impossible(f"{needed}and the working state is x_{self.working}")
        where = "and the working state is gone where backward begins"
        if not self._links(index):
            where = f"which running stage {index - 1} again does not make"
        raise Impossible(f"{needed}{where}: keep x_{index} in the sweep and load it first")

    def _check_can_leave(self, index: int) -> None:
        """Raise unless the working state can be kept or offloaded."""
        self._check_works_on(index)
        if index in self.kept:
            raise Impossible(f"x_{index} is kept already")
        if index in self.offloaded:
            raise Impossible(f"x_{index} is offloaded already")

    def _check_is_there(self, index: int) -> None:
        if index not in self.kept and index not in self.offloaded:
            raise Impossible(f"it needs x_{index} kept, and it is not")

    def _check_runs(self, start: int, stop: int, results: int) -> None:
        self._check_works_on(start)
        for index in range(start, stop):
            self._check_is_not_fixed(index)
            if self.in_backward and index > start and not self._links(index):
                raise Impossible(f"running stage {index - 1} again does not make x_{index}")
        if results and (self.in_backward or stop > start + 1):
            raise Impossible("only a run of one stage in the sweep can keep results")
        self._check_number(results, start, "kinds of results", self.costs[start].results)

    def _check_tapes(self, index: int, variant: int) -> None:
        self._check_works_on(index)
        self._check_is_untaped(index)
        if self.in_backward and variant:
            raise Impossible("only a tape of the sweep can be another one than the whole")
        self._check_number(variant, index, "variants", self.costs[index].variants)
        if self.in_backward:
            self._check_is_not_fixed(index)

    def _check_inverts(self, index: int) -> None:
        self._check_works_on(index + 1)
        self._check_is_untaped(index)
        self._check_is_not_fixed(index)
        if not self.costs[index].is_invertible:
            raise Impossible(f"stage {index} is not invertible")
        if index in self.results:
            raise Impossible(f"stage {index} has kept results, for a tape")
        if not self._links(index + 1):
            raise Impossible(f"x_{index + 1} is not what stage {index} returned")

    def _check_number(self, number: int, index: int, what: str, there: Sequence[object]) -> None:
        is_any_known = isinstance(self.costs[index], Sizes)
        if not is_whole(number, 0) or (number > len(there) and not is_any_known):
            raise Impossible(f"stage {index} has {len(there)} {what}")

    def _check_is_untaped(self, index: int) -> None:
        if index in self.tapes:
            raise Impossible(f"stage {index} is taped already")
        if index >= self.remaining:
            raise Impossible(f"stage {index} is reversed already")

    def _check_is_not_fixed(self, index: int) -> None:
        if self.costs[index].is_fixed:
            raise Impossible(
                f"stage {index} is fixed: it can only be taped, when it is first passed"
            )

    def _links(self, index: int) -> bool:
        return not 0 < index < self.num_stages or self.costs[index].is_linked

    # -- bytes -----------------------------------------------------------------------------

    def _output(self, index: int) -> int | None:
        """Return the index of the state that a run of a stage makes, or None."""
        return index + 1 if not self.in_backward or self._links(index + 1) else None

    def _enter(self, index: int, beyond: int) -> None:
        """Count a run of a stage whose input is the working state, and which uses results up."""
        cost = self.costs[index]
        if not self.in_backward:
            self.held += cost.between_bytes
            beyond = max(beyond, cost.between_run_bytes)
        self.peak = max(self.peak, self.held + beyond)
        self.forwards[index] += 1
        given = self.results.pop(index, None)
        if given is None:
            self.seconds += cost.seconds
        else:
            self.seconds += given.seconds
            self.held -= given.num_bytes

    def _lent(self, index: int) -> int:
        """Return the bytes that backward takes more since the stage before holds its output."""
        results = self.results.get(index - 1)
        is_held = index - 1 in self.tapes or (results is not None and results.holds_output)
        return self.costs[index].lent_bytes if is_held else 0

    def _recount(self, index: int) -> None:
        present = (index in self.kept or index == self.working) and index not in self.tapes
        now = self.state_bytes[index] if present else 0
        self.held += now - self.counted[index]
        self.counted[index] = now
        self.peak = max(self.peak, self.held)

    def _work(self, index: int | None) -> None:
        before, self.working = self.working, index
        if before is not None:
            self._recount(before)
        if index is not None:
            self._recount(index)
        self.swept = self.swept or index == self.num_stages

    def _offload(self, index: int) -> None:
        seconds = self.costs[index].offload_seconds
        if seconds is None:
            raise Impossible(f"x_{index} cannot be offloaded")
        self.offloaded.add(index)
        self.host += self.state_bytes[index]
        self.peak_host = max(self.peak_host, self.host)
        self.seconds += seconds

    def _drop(self, index: int) -> None:
        if index in self.offloaded:
            self.offloaded.remove(index)
            self.host -= self.state_bytes[index]
        else:
            self.kept.remove(index)
            self._recount(index)

    def _tape(self, index: int, tape: SelectiveTape, working: int | None) -> None:
        self.seconds += tape.seconds
        self.tapes[index] = tape
        self.held += tape.tape_bytes
        # The input goes into the tape before the output is counted, or it would be counted twice.
        self.counted[index], counted = 0, self.counted[index]
        self.held -= counted
        self._work(working)

    def _invert(self, index: int) -> None:
        cost = self.costs[index]
        self.num_inverses += 1
        self.seconds += cost.invert_seconds
        tape, beyond = cost.tape(0), cost.tape_run_bytes
        if cost.invert_bytes is not None:  # which counts the tape, but for the stage's input
            tape = SelectiveTape(cost.state_bytes, 0.0)
            beyond = cost.invert_bytes + self._lent(index)
        self.peak = max(self.peak, self.held + beyond)
        self._tape(index, tape, index)

    def _reverse(self, index: int) -> None:
        if index != self.remaining - 1:
            raise Impossible(f"the next stage to reverse is {self.remaining - 1}")
        if index not in self.tapes:
            raise Impossible(f"it needs a tape of stage {index}")
        cost = self.costs[index]
        if self.working is not None and self.working > index:
            self._work(None)
        tape = self.tapes.pop(index)
        self.peak = max(self.peak, self.held + tape.reverse_bytes + self._lent(index))
        self.held += cost.left_bytes - cost.between_bytes - tape.tape_bytes
        self.remaining -= 1
        self._recount(index)
