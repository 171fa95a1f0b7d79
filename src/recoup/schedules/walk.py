"""Walks: the state of a chain while a schedule is executed, for `simulate` and `trace`."""

from __future__ import annotations

from collections.abc import Sequence

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

__all__ = ["Walk"]

# The cost of a stage of which only the sizes are known: it rules out no action.
_ANY = Cost(0.0, 0, 0, is_invertible=True)


class Walk:
    """A walk through a schedule: counts memory and time action by action."""

    def __init__(
        self,
        state_bytes: Sequence[int],
        tape_bytes: Sequence[int],
        costs: Sequence[Cost] | None = None,
    ) -> None:
        self.num_stages = len(tape_bytes)
        self.state_bytes = state_bytes
        self.is_costed = costs is not None
        self.tapes_of_stage = (  # the whole tape first, then its variants
            [(SelectiveTape(size, 0.0),) for size in tape_bytes]
            if costs is None
            else [tuple(map(cost.tape, range(len(cost.variants) + 1))) for cost in costs]
        )
        self.tapes_again = None if costs is None else [cost.tape_again for cost in costs]
        self.costs = [_ANY] * self.num_stages if costs is None else costs
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
        self.peak = self.peak_states = self.peak_tapes = 0
        self.host = self.peak_host = 0
        self._recount(0)

    @classmethod
    def of(cls, costs: Sequence[Cost]) -> Walk:
        """Return a walk with costs; the last state counts 0, as it belongs to the caller."""
        states = [*(cost.state_bytes for cost in costs), 0]
        return cls(states, [cost.tape_bytes for cost in costs], costs)

    def step(self, action: Action) -> str | None:
        """Do one action; if it is impossible, return the reason instead."""
        if self.swept and not self.in_backward and action != Keep(self.num_stages):
            self.in_backward = True
            self._work(None)
        reason = self._refusal(action)
        if reason is not None:
            return reason
        match action:
            case Keep(index):
                self.kept.add(index)
            case Offload(index):
                self._offload(index)
            case Drop(index):
                self._drop(index)
            case Load(index):
                self._work(index)
            case Advance(start, stop, results):
                for index in range(start, stop):
                    kept = self._kept_results(index, results)
                    self._enter(index, self.costs[index].run_bytes + kept.num_bytes)
                    if results:
                        self.results[index] = kept
                        self.held += kept.num_bytes
                    self._work(self._output(index))
            case Tape(index, variant):
                tape = self._tape_cost(index, variant)
                taped = self.results[index].taped_bytes if index in self.results else 0
                self._enter(index, tape.tape_run_bytes - taped)
                self.forwards[index] += variant > 0  # backward runs it once more, in part
                self._tape(index, tape, self._output(index))
            case Invert(index):
                self._invert(index)
            case Reverse(index):
                self._reverse(index)
        self.peak = max(self.peak, self.held)
        self.peak_states = max(self.peak_states, len(self.kept))
        self.peak_tapes = max(self.peak_tapes, len(self.tapes))
        return None

    # -- refusals --------------------------------------------------------------------------

    def _refusal(self, action: Action) -> str | None:
        if not self._in_range(action):
            return f"a chain of {self.num_stages} stages has no such stage or state"
        if not self.swept and isinstance(action, Load | Invert | Reverse):
            return f"it belongs to backward, but the sweep has not reached x_{self.num_stages}"
        match action:
            case Keep(index):
                return self._needs(index) or self._present(index)
            case Offload(index):
                return self._needs(index) or self._present(index) or self._unmovable(index)
            case Drop(index) | Load(index):
                there = index in self.kept or index in self.offloaded
                return None if there else f"it needs x_{index} kept, and it is not"
            case Advance(start, stop, results):
                reason = self._needs(start) or self._unfit(start, stop)
                return reason or self._unkeepable(start, stop, results)
            case Tape(index, variant):
                return self._needs(index) or self._untaped(index) or self._untapable(index, variant)
            case Invert(index):
                reason = self._needs(index + 1) or self._untaped(index) or self._fixed(index)
                return reason or self._uninvertible(index)
            case Reverse(index):
                if index != self.remaining - 1:
                    return f"the next stage to reverse is {self.remaining - 1}"
                return None if index in self.tapes else f"it needs a tape of stage {index}"

    def _in_range(self, action: Action) -> bool:
        match action:
            case Keep(index) | Drop(index) | Load(index):
                return 0 <= index <= self.num_stages
            case Advance(start, stop):
                return 0 <= start < stop <= self.num_stages
            case Tape(index) | Invert(index) | Reverse(index) | Offload(index):
                return 0 <= index < self.num_stages

    def _needs(self, index: int) -> str | None:
        if self.working == index:
            return None
        if self.working is not None:
            return (
                f"it needs the working state x_{index}, and the working state is x_{self.working}"
            )
        if not self._links(index):
            return (
                f"it needs the working state x_{index}, which running stage {index - 1} again "
                f"does not make: keep x_{index} in the sweep and load it first"
            )
        return (
            f"it needs the working state x_{index}, and the working state is gone where "
            f"backward begins: keep x_{index} in the sweep and load it first"
        )

    def _present(self, index: int) -> str | None:
        if index in self.kept:
            return f"x_{index} is kept already"
        return f"x_{index} is offloaded already" if index in self.offloaded else None

    def _unmovable(self, index: int) -> str | None:
        if self.is_costed and self.costs[index].offload_seconds is None:
            return f"x_{index} cannot be offloaded"
        return None

    def _untaped(self, index: int) -> str | None:
        if index in self.tapes:
            return f"stage {index} is taped already"
        return f"stage {index} is reversed already" if index >= self.remaining else None

    def _fixed(self, index: int) -> str | None:
        if self.costs[index].is_fixed:
            return f"stage {index} is fixed: it can only be taped, when it is first passed"
        return None

    def _unfit(self, start: int, stop: int) -> str | None:
        for index in range(start, stop):
            if self.costs[index].is_fixed:
                return self._fixed(index)
            if self.in_backward and index > start and not self._links(index):
                return f"running stage {index - 1} again does not make x_{index}"
        return None

    def _unkeepable(self, start: int, stop: int, results: int) -> str | None:
        if not results:
            return None
        if self.in_backward or stop > start + 1:
            return "only a run of one stage in the sweep can keep results"
        if results < 0 or (self.is_costed and results > len(self.costs[start].results)):
            return f"stage {start} has {len(self.costs[start].results)} kinds of results"
        return None

    def _untapable(self, index: int, variant: int) -> str | None:
        if self.in_backward and variant:
            return "only a tape of the sweep can be another one than the whole"
        if variant < 0 or (self.is_costed and variant > len(self.costs[index].variants)):
            return f"stage {index} has {len(self.costs[index].variants)} variants"
        return self._fixed(index) if self.in_backward else None

    def _uninvertible(self, index: int) -> str | None:
        if not self.costs[index].is_invertible:
            return f"stage {index} is not invertible"
        if index in self.results:
            return f"stage {index} has kept results, for a tape"
        if not self._links(index + 1):
            return f"x_{index + 1} is not what stage {index} returned"
        return None

    def _links(self, index: int) -> bool:
        return not 0 < index < self.num_stages or self.costs[index].is_linked

    # -- bytes -----------------------------------------------------------------------------

    def _output(self, index: int) -> int | None:
        """Return the index of the state that a run of a stage makes, or None."""
        return index + 1 if not self.in_backward or self._links(index + 1) else None

    def _tape_cost(self, index: int, variant: int) -> SelectiveTape:
        if self.in_backward and self.tapes_again is not None:
            return self.tapes_again[index]
        return self.tapes_of_stage[index][variant if self.is_costed else 0]

    def _kept_results(self, index: int, number: int) -> Results:
        return self.costs[index].kept(number) if self.is_costed else Results(0, 0.0)

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
        self.offloaded.add(index)
        self.host += self.state_bytes[index]
        self.peak_host = max(self.peak_host, self.host)
        self.seconds += self.costs[index].offload_seconds or 0.0

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
        if cost.invert_bytes is None:
            self.peak = max(self.peak, self.held + cost.tape_run_bytes)
            self._tape(index, self.tapes_of_stage[index][0], index)
            return
        self.peak = max(self.peak, self.held + cost.invert_bytes + self._lent(index))
        self._tape(
            index, SelectiveTape(cost.state_bytes, 0.0), index
        )  # its bytes were counted just now

    def _reverse(self, index: int) -> None:
        cost = self.costs[index]
        if self.working is not None and self.working > index:
            self._work(None)
        tape = self.tapes.pop(index)
        self.peak = max(self.peak, self.held + tape.reverse_bytes + self._lent(index))
        self.held += cost.left_bytes - cost.between_bytes - tape.tape_bytes
        self.remaining -= 1
        self._recount(index)
