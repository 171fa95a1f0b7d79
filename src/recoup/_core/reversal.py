"""The reversal: executes the part of a schedule that belongs to backward.

NOTE [ Reversing a chain ]

Rule 1. Autograd unpacks residuals in descending order of stages. Unpacking an empty slot executes
        the schedule up to the action that tapes its stage.
Rule 2. If that action was already executed (a second backward over a retained graph, or one after
        an exception), the schedule is executed again from its start, on the same graph. If the
        stage has not been reversed yet, that stage alone is run again.
Rule 3. Stages above the one whose residuals are needed are advanced over, not taped: a loss of an
        early latent alone would otherwise make tapes that autograd never uses.
Rule 4. A state that an inverse returns is compared with the state of forward before autograd uses
        anything computed from it. If it is too far off, the drift guard decides.
Rule 5. There may be fewer stages than the schedule is for; actions on the missing ones are skipped.
        If residuals of a stage are needed before the chain has ended, the stage is run again from
        the nearest state that is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from recoup._core.drift_comparison import DriftComparison
from recoup._core.inverted_region import InvertedRegion
from recoup._core.lazy_values import HasTensor
from recoup._core.offload import Away, Traffic
from recoup._core.outcome import mismatch
from recoup._core.prepared_schedule import Prepared
from recoup._core.region import Region, Stage, State
from recoup._core.saved_tensors import Kept, detached, without_history
from recoup._core.tiers import tier_for
from recoup.errors import DriftError, ReplayError, ScheduleError
from recoup.schedules import Action, Advance, Drop, Invert, Keep, Load, Offload, Reverse, Tape

__all__ = ["Forward", "Output", "Reversal"]


class Output(Protocol):
    """A tensor of the last state that a second run of the last stage makes again."""

    def take(self, output: Tensor) -> None:
        """Take the tensor that a second run has made."""
        ...


class Forward:
    """What the forward of a chain leaves for its backward.

    Args:
        schedule: the schedule that both follow.
        drift: compares the states that inverses return; None if nothing is compared.
    """

    __slots__ = ("_traffic", "drift", "has_ended", "kept", "outputs", "runs", "schedule", "stages")

    def __init__(self, schedule: Prepared, drift: DriftComparison | None) -> None:
        self.schedule = schedule
        self.drift = drift
        self.stages: list[Stage] = []
        self.runs: list[Region | None] = []  # of the stages that may run again
        self.kept: dict[int, tuple[HasTensor, ...]] = {}  # states, by the stage they enter
        self.outputs: list[tuple[int, weakref.ref[Output]]] = []
        self.has_ended = False
        self._traffic: dict[str, Traffic] = {}  # by where offloaded states wait

    def traffic(self, to: str) -> Traffic:
        """Return the traffic of states that wait in `to`."""
        if to not in self._traffic:
            self._traffic[to] = Traffic(tier_for(to))
        return self._traffic[to]

    def raise_failures(self) -> None:
        """Raise if a state could not be moved where the schedule wants it."""
        for to, traffic in self._traffic.items():
            traffic.raise_failure(to)

    @property
    def is_whole(self) -> bool:
        """Whether there are as many stages as the schedule is for."""
        return len(self.stages) == self.schedule.num_stages


class Reversal:
    """The states and the position of one backward through a chain."""

    __slots__ = ("_current", "_forward", "_kept", "_offloaded", "_position")

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._position = forward.schedule.sweep_end
        self._current: tuple[int, State] = (-1, ())
        self._kept: dict[int, State] = {}
        self._offloaded: dict[int, tuple[Away | Kept, ...]] = {}

    def fill_slots(self, index: int) -> None:
        """Fill the slots of stage `index` (See Rules 1 and 2)."""
        forward = self._forward
        schedule = forward.schedule
        target = schedule.tape_at[index]
        try:
            if not forward.has_ended or (schedule.inverted and not forward.is_whole):
                self._fill_alone(index)
                return
            run = self._run(index)
            inputs = run.inputs
            if inputs is not None and target < self._position:
                self._fill(index, inputs)
                return
            if target < self._position:
                self._restart()
            if forward.drift is not None and self._position == schedule.sweep_end:
                forward.drift.begin_backward()
            while self._position <= target:
                action = schedule.actions[self._position]
                self._position += 1
                self._execute(action, index)
        except BaseException:
            self._forget()
            raise

    def _fill_alone(self, index: int) -> None:
        """Fill the slots of stage `index` from the nearest state that is kept (See Rule 5)."""
        if not self._forward.schedule.restarts:
            raise ReplayError(
                f"Forward ended with {self._forward.stages[-1].name}, but the schedule has "
                f"{self._forward.schedule.num_stages} stages and inverts from those after it, and "
                "it keeps no first state. Make a schedule for the stages that are called."
            )
        start = max(at for at in self._forward.kept if at <= index)
        self._load(start)
        for at in range(start, index):
            self._advance(at)
        state = self._state_at(index)
        self._forget()
        self._fill(index, state)

    def _forget(self) -> None:
        """Release all that backward has made, so that the next demand starts over."""
        self._position = len(self._forward.schedule.actions)
        self._current = (-1, ())
        self._kept.clear()
        self._offloaded.clear()
        for run in self._forward.runs:
            if run is not None:
                run.inputs = None

    def _restart(self) -> None:
        """Restore the states that the sweep kept and backward has dropped (See Rule 2)."""
        self._forget()
        if self._forward.schedule.restarts:  # others drop nothing that the sweep kept
            self._load(0)
            for action in self._forward.schedule.actions[: self._forward.schedule.last_keep + 1]:
                self._execute(action, -1)
        self._position = self._forward.schedule.sweep_end

    def _execute(self, action: Action, demanded: int) -> None:
        forward = self._forward
        num_stages = len(forward.stages)
        if num_stages < forward.schedule.num_stages:
            if isinstance(action, Advance) and action.stop >= num_stages:
                action = Advance(action.start, max(action.start, num_stages - 1))  # See Rule 5
            elif not isinstance(action, Advance) and action.index >= num_stages:
                return
        # By type, since a match statement would try one pattern after the other.
        _EXECUTES[type(action)](self, action, demanded)

    def _advance_over(self, action: Advance, demanded: int) -> None:
        for index in range(action.start, action.stop):
            self._advance(index)

    def _keep(self, action: Keep, demanded: int) -> None:
        self._kept[action.index] = self._state_at(action.index)

    def _offload(self, action: Offload, demanded: int) -> None:
        traffic, name = self._forward.traffic(action.to), f"State {action.index}"
        self._offloaded[action.index] = tuple(
            [
                traffic.send(value, name) or Kept(value, name, None)
                for value in self._state_at(action.index)
            ]
        )

    def _tape(self, action: Tape, demanded: int) -> None:
        index = action.index
        if index > demanded:
            self._advance(index)  # See Rule 3
            return
        state = self._state_at(index)
        self._run(index).inputs = state
        self._current = (index + 1, self._fill(index, state))

    def _reverse(self, action: Reverse, demanded: int) -> None:
        # Autograd reverses the stage; its slots are empty by now.
        run = self._forward.runs[action.index]
        if run is not None:
            run.inputs = None

    def _fill(self, index: int, state: State) -> State:
        is_last = index + 1 == len(self._forward.stages)
        needs_output = index in self._forward.schedule.tapes_that_go_on or (
            is_last and any(ref() is not None for _, ref in self._forward.outputs)
        )
        output = self._run(index).fill(state, needs_output=needs_output)
        if not is_last:
            return output
        for place, ref in self._forward.outputs:
            source = ref()
            if source is not None and output:
                source.take(output[place])
        return ()  # nothing is run from the last state

    def _advance(self, index: int) -> None:
        self._current = (index + 1, self._run(index).advance(self._state_at(index)))

    def _invert(self, action: Invert, demanded: int) -> None:
        index = action.index
        is_taped = index <= demanded
        # Handed over, so that the stage can free it half way.
        run = self._run(index)
        if not isinstance(run, InvertedRegion):
            raise ReplayError(f"{self._forward.stages[index].name} did not run to be inverted.")
        state = run.invert(self._take(index + 1), is_taped=is_taped)
        if self._forward.drift is not None:
            state = self._compared(index, state, self._forward.drift, is_taped=is_taped)
        self._current = (index, state)
        if is_taped:
            self._run(index).inputs = state

    def _compared(
        self, index: int, state: State, drift: DriftComparison, *, is_taped: bool
    ) -> State:
        """Return the state that an inverse returned, or the recomputed one (See Rule 4)."""
        if drift.is_within(index, state, self._forward.stages[index].name):
            if index not in self._kept:
                return state
            drift.mark_exact(index)
            # Backward kept it to recompute the stages above, which are done now.
            return self._kept[index] if index in self._forward.kept else self._kept.pop(index)
        del state
        sources = [at for at in (*self._forward.kept, *self._kept) if at <= index]
        if not sources:
            raise DriftError(
                f"The inverse of {self._forward.stages[index].name} drifted, and the schedule "
                "keeps no state to compute its input from. Keep one in the schedule, or use "
                'drift="raise".'
            )
        start = max(sources)
        self._check_alone(start, index)
        spacing = drift.keep_from_now_on(index)
        self._load(start)
        for at in range(start, index):
            if (index - at) % spacing == 0 and at not in self._kept:
                self._kept[at] = self._state_at(at)
            self._advance(at)
        drift.mark_exact(index)
        state = self._state_at(index)
        run = self._run(index)
        output = run.fill(state) if is_taped else ()
        if not drift.is_exact(index, state) or not drift.is_exact(index + 1, output):
            raise mismatch(run.surroundings, "what it is given, or returns, is another tensor")
        return state

    def _check_alone(self, start: int, stop: int) -> None:
        """Raise if a stage is sharded: other ranks may see no drift, and would not run it again."""
        stages = self._forward.stages
        for stage in stages[start:stop]:
            if any(hasattr(part, "unshard") for one in stage.modules for part in one.modules()):
                raise DriftError(
                    f"The inverse of {stages[stop].name} drifted, and its input cannot be "
                    f"computed again: {stage.name} is sharded, so that all ranks must run it "
                    'together. Bound the scale of the layers, or use memory="sqrt".'
                )

    def _drop(self, action: Drop, demanded: int) -> None:
        index = action.index
        self._kept.pop(index, None)
        self._offloaded.pop(index, None)
        # The source of a restart stays: the first state, and the last, which is mostly the
        # caller's; or all that the sweep has kept, if the first state is not kept.
        schedule = self._forward.schedule
        if schedule.restarts and index not in (0, schedule.num_stages):
            self._forward.kept.pop(index, None)

    def _load(self, index: int) -> None:
        state = self._kept.get(index)
        moved = self._offloaded.get(index)
        if state is None and moved is not None:
            state = detached(value.get() for value in moved)
        elif state is None:
            # The pair beneath may give it once only (torch's checkpoint does).
            state = without_history([kept.get() for kept in self._forward.kept[index]])
            self._kept[index] = state
        self._current = (index, state)
        if self._forward.drift is not None:
            self._forward.drift.mark_exact(index)

    def _state_at(self, index: int) -> State:
        at, state = self._current
        if at != index:
            raise ScheduleError(f"The schedule needs state {index} where it has state {at}.")
        return state

    def _take(self, index: int) -> State:
        state = self._state_at(index)
        self._current = (-1, ())
        return state

    def _run(self, index: int) -> Region:
        run = self._forward.runs[index]
        if run is None:
            raise ScheduleError(
                f"The schedule runs {self._forward.stages[index].name} again, but taped it in the "
                "sweep and keeps no state after it. Add a Keep of that state to the sweep."
            )
        return run


_EXECUTES: dict[type, Callable[[Reversal, Any, int], None]] = {
    Advance: Reversal._advance_over,
    Drop: Reversal._drop,
    Invert: Reversal._invert,
    Keep: Reversal._keep,
    Load: lambda reversal, action, demanded: reversal._load(action.index),
    Offload: Reversal._offload,
    Reverse: Reversal._reverse,
    Tape: Reversal._tape,
}
