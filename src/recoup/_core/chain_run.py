"""The run of a chain: one forward under a schedule, and the backward that belongs to it.

NOTE [ Running a chain ]

Rule 1. The sweep runs with the model's forward, and the whole graph is built in it, an ordinary
        one. A stage that the sweep tapes keeps its residuals as any module does; one that it
        advances over becomes a region, whose slots are empty.
Rule 2. The run holds the regions of its stages; a slot holds its region and the run. So all of it
        goes with the slots that autograd holds.
Rule 3. States that the sweep keeps go through the pair of hooks beneath; those that backward keeps
        do not.
Rule 4. Autograd unpacks residuals in descending order of stages. Unpacking an empty slot executes
        the schedule up to the action that tapes its stage.
Rule 5. If that was already done (a second backward over a retained graph, or one after an
        exception), the schedule is executed again from its start. If the stage has not been
        reversed yet, that stage alone is run again.
Rule 6. Stages above the one whose residuals are needed are advanced over, not taped: a loss of an
        early latent alone would otherwise make tapes that autograd never uses.
Rule 7. A state that an inverse returns is compared with that of forward before autograd uses
        anything computed from it. If it is too far off, the drift guard decides.
Rule 8. User code may enter stages one at a time, and fewer than the schedule is for; actions on the
        missing ones are skipped. What is needed before the chain has ended is made from the nearest
        state that is kept.
Rule 9. A value that a stage returns, and only it could make again, is kept itself where the
        schedule keeps it as a state: a stage cannot run again while a state is loaded.
Rule 10. When autograd holds no slot of a stage and of all above it, the draws and decisions of its
        first run are freed. If such a stage runs again (Rule 5), nobody reads what it makes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from recoup._core.drift_guard import DriftComparison, DriftGuard, check_can_run_alone
from recoup._core.lazy_values import keep
from recoup._core.offload import Away, Traffic, tier_for
from recoup._core.outcome import mismatch
from recoup._core.region import InvertedRegion, Region, Stage, changes_kept_input
from recoup._core.saved_tensors import (
    Kept,
    Packed,
    copies_of,
    detached,
    pair_in_force,
    storage_id,
    unpack,
)
from recoup._core.slots import Filled, State
from recoup.errors import DriftError, ReplayError, ScheduleError
from recoup.schedules import (
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
from recoup.schedules._simulate import Prepared


class Run:
    """One forward of a chain and its backward, with the drift guard if inverses are checked."""

    def __init__(self, schedule: Prepared, guard: DriftGuard | None) -> None:
        self._schedule = schedule
        self._drift: DriftComparison | None = None
        if guard is not None and guard.otherwise != "ignore":
            self._drift = DriftComparison(guard, schedule.inverted)
        self.lock = threading.RLock()
        self.stages: list[Stage] = []  # that were entered so far
        self._regions: list[Region | None] = []  # of the stages that may run again
        self._kept: dict[int, tuple[Packed, ...]] = {}  # states, by the stage they enter
        self._storages: set[int] = set()  # of these states
        self._traffic: dict[str, Traffic] = {}  # by where offloaded states wait
        self._has_ended = False
        self._num_wanted = 0  # stages, the last of which autograd may still ask for (See Rule 10)
        # In backward: the next action, the working state and its place, and states that are kept.
        self._position = schedule.sweep_end
        self._at, self._state = -1, ()
        self._states: dict[int, State] = {}
        self._away: dict[int, list[Away | Kept]] = {}
        self._taped: list[Region] = []  # whose inputs are held until autograd has reversed them

    # -- forward ---------------------------------------------------------------------------

    def enter(self, stage: Stage, state: State) -> tuple[State, Any]:
        """Run the next stage as the schedule says (See Rule 1)."""
        schedule, index = self._schedule, len(self.stages)
        self.stages.append(stage)
        self._regions.append(None)
        before, is_taped, is_run_again = schedule.steps[index]
        given = copies_of(state) if before and stage.is_in_place else state  # what is kept
        for action in before:
            if isinstance(action, Drop):
                if action.index != 0 and schedule.restarts:  # the others begin a restart
                    self._kept.pop(action.index, None)
            elif isinstance(action, Offload):
                self._keep_input(index, given, action.to)
            elif index not in self._kept:
                self._keep_input(index, given)
        if stage.is_in_place and not self._has_parted(state):  # an earlier stage has passed it on
            state = tuple([value.clone() for value in state])
        if is_taped and not is_run_again:
            return stage.forward(state)
        is_inverted = index in schedule.inverted and not is_taped
        region = InvertedRegion(stage, state, index) if is_inverted else Region(stage, state, index)
        self._regions[index] = region
        if is_taped:
            return region.tape(state)
        # Others than the first are made again, if not in the first backward, then in a second.
        result = region.record(state, self, is_kept=index == 0)
        if is_inverted and self._drift is not None and not region.changes_input:
            self._drift.sketch_input(index, state, result[0])
        if region.changes_input and index in self._kept and not stage.is_in_place:
            raise changes_kept_input(stage)
        return result

    def end(self, state: State) -> None:
        """End the forward; `state` is the output of the last stage."""
        schedule, num_stages = self._schedule, len(self.stages)
        if schedule.keeps_output and num_stages == schedule.num_stages:
            name, pair = "The output of the chain", pair_in_force()
            self._kept[num_stages] = tuple([Kept(value, name, pair) for value in state])
        self._has_ended, self._num_wanted = True, num_stages
        for to, traffic in self._traffic.items():
            traffic.raise_failure(to)
        if self._drift is not None:
            regions = enumerate(self._regions)
            wanted = (at for at, each in regions if each is not None and each.are_wanted)
            self._drift.end_forward(next(wanted, num_stages))

    def _has_parted(self, state: State) -> bool:
        """Whether `state` is not kept, or copies of it are from now on."""
        storages = set(map(storage_id, state))
        if self._storages.isdisjoint(storages):
            return True
        for kept in itertools.chain(*self._kept.values()):
            if type(kept) is not Kept or not kept.has_parted(storages):
                return False
        return True

    def _keep_input(self, index: int, state: State, to: str = "") -> None:
        pair, name = pair_in_force(), f"The input of {self.stages[index].name}"  # See Rule 3
        self._storages.update(map(storage_id, state))
        if to and pair is None:  # which would decide where states are
            self._kept[index] = tuple(self._sent(state, name, to))
            return
        keeps = Kept if index else keep  # See Rule 9
        self._kept[index] = tuple(map(keeps, state, itertools.repeat(name), itertools.repeat(pair)))

    def _sent(self, state: State, name: str, to: str) -> list[Away | Kept]:
        traffic = self._traffic.get(to)
        if traffic is None:
            traffic = self._traffic[to] = Traffic(tier_for(to))
        return [traffic.send(value, name) or Kept(value, name, None) for value in state]

    # -- backward --------------------------------------------------------------------------

    def fill_slots(self, index: int) -> None:
        """Fill the slots of stage `index`, in backward or before forward has ended."""
        schedule = self._schedule
        is_short = len(self.stages) < schedule.num_stages
        try:
            if not self._has_ended or (is_short and schedule.inverted):
                self._fill_alone(index)
                return
            target = schedule.tape_at[index]
            if target < self._position:  # See Rule 5
                region = self._region(index)
                inputs = region.inputs_again()
                if inputs is not None:
                    self._fill(index, inputs, region)
                    return
                self._restart()
            if self._drift is not None and self._position == schedule.sweep_end:
                self._drift.begin_backward()
            for region in self._taped:  # autograd has reversed their stages
                if region.inputs is not None and region.inputs() is not None:
                    region.forget_inputs()
                given = region.surroundings
                if given.start is not None or given.kept_outputs is not None:
                    self._release_above(index)
            self._taped = []
            while self._position <= target:
                action = schedule.actions[self._position]
                self._position += 1
                # By type, since a match statement would try one pattern after the other.
                execute = _EXECUTES.get(type(action))
                if is_short:
                    action = self._within(action)
                if execute is not None and action is not None:
                    execute(self, action, index)
        except BaseException:
            self._forget()
            raise

    def _release_above(self, index: int) -> None:
        """Free what the last stages keep for runs of theirs, if nobody asks any more (Rule 10)."""
        while self._num_wanted > index + 1:
            region = self._regions[self._num_wanted - 1]
            if region is not None:
                if region.are_wanted:
                    return
                region.surroundings.release()
            self._num_wanted -= 1

    def _within(self, action: Action) -> Action | None:
        """Return the part of an action that is on stages which were entered (See Rule 8)."""
        if isinstance(action, Advance):
            stop = min(action.stop, len(self.stages) - 1)
            return replace(action, stop=stop) if action.start < stop else None
        is_in = action.index < len(self.stages) and not isinstance(action, Reverse)
        return action if is_in else None

    def _fill_alone(self, index: int) -> None:
        """Fill the slots of stage `index` from the nearest state that is kept (See Rule 8)."""
        if not self._schedule.restarts:
            raise ReplayError(
                f"Forward ended with {self.stages[-1].name}, but the schedule has "
                f"{self._schedule.num_stages} stages and inverts from those after it, and "
                "it keeps no first state. Make a schedule for the stages that are called."
            )
        self._advance_from(max(at for at in self._kept if at <= index), index)
        region, state = self._region_at(index)
        self._forget()
        self._position = self._schedule.sweep_end
        self._fill(index, state, region)

    def _advance_from(self, start: int, stop: int, spacing: int = 0) -> None:
        """Make the state at `stop` from that at `start`; keep every one of `spacing` before it."""
        self._load(Load(start), stop)
        for at in range(start, stop):
            if spacing and (stop - at) % spacing == 0 and at not in self._states:
                self._states[at] = self._state_at(at)
            self._advance(at)

    def _forget(self) -> None:
        """Release all that backward has made, so that the next demand starts over."""
        self._position = len(self._schedule.actions)
        self._at, self._state = -1, ()
        self._states.clear()
        self._away.clear()
        for region in self._taped:
            region.forget_inputs()

    def _restart(self) -> None:
        """Restore the states that the sweep kept and backward has dropped (See Rule 5)."""
        self._forget()
        schedule = self._schedule
        if schedule.restarts:  # others drop nothing that the sweep kept
            self._load(Load(0), -1)
            for action in map(self._within, schedule.actions[: schedule.last_keep + 1]):
                if action is not None:
                    _EXECUTES[type(action)](self, action, -1)
        self._position = schedule.sweep_end

    # -- actions, each for a stage whose residuals are demanded ------------------------------

    def _advance_over(self, action: Advance, demanded: int) -> None:
        for index in range(action.start, action.stop):
            self._advance(index)

    def _keep(self, action: Keep, demanded: int) -> None:
        self._states[action.index] = self._state_at(action.index)

    def _offload(self, action: Offload, demanded: int) -> None:
        index = action.index
        self._away[index] = self._sent(self._state_at(index), f"State {index}", action.to)

    def _tape(self, action: Tape, demanded: int) -> None:
        index = action.index
        if index > demanded:
            self._advance(index)  # See Rule 6
            return
        region, state = self._region_at(index)
        self._taped.append(region)
        self._at, self._state = index + 1, self._fill(index, state, region)

    def _drop(self, action: Drop, demanded: int) -> None:
        index = action.index
        self._states.pop(index, None)
        self._away.pop(index, None)
        # The source of a restart stays: the first state, and the last, which is mostly the
        # caller's; or all that the sweep has kept, if the first state is not kept.
        if self._schedule.restarts and index not in (0, self._schedule.num_stages):
            self._kept.pop(index, None)

    def _invert(self, action: Invert, demanded: int) -> None:
        index = action.index
        is_taped = index <= demanded
        region = self._region(index)
        if not isinstance(region, InvertedRegion):
            raise ReplayError(f"{self.stages[index].name} did not run to be inverted.")
        drift, state = self._drift, None
        is_compared = drift is not None
        try:  # handed over, so that the stage can free it half way
            state = region.invert(self._take(index + 1), is_taped=is_taped, is_compared=is_compared)
        except Filled:
            raise
        except Exception as error:
            if drift is None or not drift.takes_failure(index, region.stage.name, error):
                raise
        if drift is not None:
            state = self._compared(index, state, drift, is_taped=is_taped)
        self._at, self._state = index, state or ()
        if is_taped:
            self._taped.append(region)

    def _fill(self, index: int, state: State, region: Region) -> State:
        return region.fill(state, needs_output=index in self._schedule.tapes_that_go_on)

    def _advance(self, index: int) -> None:
        region, state = self._region_at(index)
        self._at, self._state = index + 1, region.advance(state)

    def _load(self, action: Load, demanded: int) -> None:
        index = action.index
        state = self._states.get(index)
        away = self._away.get(index)
        if state is None and away is not None:
            state = detached(value.get() for value in away)
        elif state is not None:
            for kept in self._kept.get(index, ()):
                if type(kept) is Kept:
                    kept.check()
        else:
            # The pair beneath may give it once only (torch's checkpoint does).
            state = self._states[index] = tuple(map(unpack, self._kept[index]))
        self._at, self._state = index, state
        if self._drift is not None:
            self._drift.mark_exact(index)

    def _compared(
        self, index: int, state: State | None, drift: DriftComparison, *, is_taped: bool
    ) -> State:
        """Return the state that an inverse returned, or the recomputed one (See Rule 7)."""
        has_failed = state is None
        if state is not None and drift.is_within(index, state, self.stages[index].name):
            if index not in self._states:
                return state
            drift.mark_exact(index)
            # Backward kept it to recompute the stages above, which are done now.
            return self._states[index] if index in self._kept else self._states.pop(index)
        del state
        sources = [at for at in (*self._kept, *self._states) if at <= index]
        if not sources:
            raise DriftError(
                f"The inverse of {self.stages[index].name} drifted, and the schedule "
                "keeps no state to compute its input from. Keep one in the schedule, or use "
                'drift="raise".'
            )
        start = max(sources)
        for stage in self.stages[start:index]:
            check_can_run_alone(stage.name, stage.modules, self.stages[index].name)
        self._advance_from(start, index, drift.keep_from_now_on(index, has_failed=has_failed))
        drift.mark_exact(index)
        region, state = self._region_at(index)
        output = region.fill(state) if is_taped else ()
        if not drift.is_exact(index, state) or not drift.is_exact(index + 1, output):
            raise mismatch(region.surroundings, "what it is given, or returns, is another tensor")
        return state

    def _state_at(self, index: int) -> State:
        if self._at != index:
            raise ScheduleError(f"The schedule needs state {index} where it has state {self._at}.")
        return self._state

    def _region_at(self, index: int) -> tuple[Region, State]:
        """Return the region of a stage, and the working state, which must be its input."""
        region = self._regions[index]
        if region is None or self._at != index:  # one of these raises
            return self._region(index), self._state_at(index)
        return region, self._state

    def _take(self, index: int) -> State:
        state = self._state_at(index)
        self._at, self._state = -1, ()
        return state

    def _region(self, index: int) -> Region:
        region = self._regions[index]
        if region is None:
            raise ScheduleError(
                f"The schedule runs {self.stages[index].name} again, but taped it in the "
                "sweep and keeps no state after it. Add a Keep of that state to the sweep."
            )
        return region


_EXECUTES: dict[type, Callable[[Run, Any, int], None]] = {
    Advance: Run._advance_over,
    Drop: Run._drop,
    Invert: Run._invert,
    Keep: Run._keep,
    Load: Run._load,
    Offload: Run._offload,
    Tape: Run._tape,
}
