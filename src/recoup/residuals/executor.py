"""The executor: runs a schedule over a chain, in forward and in backward.

NOTE [ One executor ]

Rule 1. The sweep runs with the model's forward, and the whole graph is built in it, so that
        parameters, hooks and `autograd.grad` see an ordinary graph. A stage that the sweep
        tapes keeps its residuals as any module does; one that it advances over becomes a
        region, whose slots are empty.
Rule 2. Autograd asks for residuals in descending order of stages. A slot that is empty moves
        the schedule on, to the action that tapes its stage.
Rule 3. Asked for a stage whose action lies behind (a second backward over a retained graph, or
        one after an exception), the schedule is run from its start, the graph left as it is.
        Asked again for a stage that is not reversed yet, that stage alone is run again.
Rule 4. The run holds its records; a region holds the run, and a record its region weakly. So
        nothing here outlives the slots that autograd holds, without the garbage collector.
Rule 5. What the sweep keeps goes to the pair of hooks beneath; what backward keeps, for a
        while, does not.
Rule 6. What is above the stage that is asked for is not taped on the way: a loss of an early
        latent alone would otherwise pile up tapes that nobody takes.
Rule 7. A stage may change what it is given in place, as an in-place activation does. Its second
        runs get a copy; what the sweep keeps of such a state is a copy, if the module says that
        it is in place, or else an error in forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from recoup.errors import ReplayError, ScheduleError
from recoup.residuals.compiler import is_loaded, uncompiled
from recoup.residuals.evaluation import Evaluations, is_answered
from recoup.residuals.guards import is_in_place
from recoup.residuals.held import Held
from recoup.residuals.hooks import Kept, pair_in_force
from recoup.residuals.region import Region
from recoup.residuals.rerun import Rerun
from recoup.schedules import (
    Action,
    Advance,
    Drop,
    Invert,
    Keep,
    Load,
    Reverse,
    Schedule,
    Tape,
    simulate,
)

__all__ = ["Plan", "Stage", "State"]

State = tuple[Tensor, ...]
_NOTHING = nullcontext()


class Stage(Protocol):
    """One stage of a chain, as the executor sees it."""

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Whose parameters, buffers and modes it uses."""
        ...

    @property
    def code(self) -> object:
        """What it runs, a module or the code object of a function; None if it is built in."""
        ...

    @property
    def held(self) -> Held | None:
        """What a function reads beside its arguments; None for a module."""
        ...

    def forward(self, state: State) -> tuple[State, Tensor | None]:
        """Return the next state, and a value beside the chain (a log-determinant)."""
        ...

    def inverse(self, state: State) -> State:
        """Return the state before this stage."""
        ...


class Plan:
    """A schedule made ready to be executed any number of times."""

    __slots__ = ("actions", "inverted", "last_keep", "num_stages", "sweep_end", "tape_at")

    def __init__(self, schedule: Schedule) -> None:
        simulate(schedule)  # raises on a schedule that cannot be executed
        self.num_stages = schedule.num_stages
        self.actions = schedule.actions
        self.sweep_end = _end_of_sweep(schedule)
        backward = range(self.sweep_end, len(self.actions))
        self.tape_at = {
            action.index: place
            for place in backward
            if isinstance(action := self.actions[place], Tape | Invert)
        }
        self.inverted = {a.index for a in self.actions if isinstance(a, Invert)}
        self.last_keep = max(
            (
                place
                for place, action in enumerate(self.actions[: self.sweep_end])
                if isinstance(action, Keep) and action.index < self.num_stages
            ),
            default=-1,
        )

    def execute(self, stages: Sequence[Stage], state: State) -> tuple[State, list[Tensor | None]]:
        """Run the chain forward; its backward will follow the schedule.

        Returns:
            The last state and, for each stage, the value beside the chain.
        """
        if self.num_stages != len(stages):
            raise ScheduleError(
                f"The schedule is for {self.num_stages} stages and the chain has {len(stages)}. "
                f"Make it anew for {len(stages)} stages."
            )
        if is_answered():
            return _run_plainly(stages, state)  # the region around it owns every residual
        if is_loaded():
            return uncompiled(_sweep)(self, stages, state)
        return _sweep(self, stages, state)


def _sweep(plan: Plan, stages: Sequence[Stage], state: State) -> tuple[State, list[Tensor | None]]:
    return _Run(stages, plan).sweep(state)


def _run_plainly(stages: Sequence[Stage], state: State) -> tuple[State, list[Tensor | None]]:
    beside: list[Tensor | None] = []
    for stage in stages:
        state, value = stage.forward(state)
        beside.append(value)
    return state, beside


def _end_of_sweep(schedule: Schedule) -> int:
    for place, action in enumerate(schedule.actions):
        reached = action.stop if isinstance(action, Advance) else 0
        reached = action.index + 1 if isinstance(action, Tape) else reached
        if reached == schedule.num_stages:
            after = schedule.actions[place + 1] if place + 1 < len(schedule.actions) else None
            return place + (2 if after == Keep(schedule.num_stages) else 1)
    raise ScheduleError(f"The schedule {schedule.name} never reaches its last state.")


class _Record:
    """What the first run of one stage left for the second."""

    __slots__ = ("changes_input", "evaluations", "region", "requires_grad", "rerun", "shapes")

    def __init__(self, stage: Stage, state: State) -> None:
        self.changes_input = False
        self.rerun = Rerun(stage.name, stage.modules, stage.code, stage.held)
        self.region: weakref.ref[Region] | None = None  # See Rule 4
        self.evaluations: Evaluations | None = None
        self.requires_grad = tuple(value.requires_grad for value in state)
        self.shapes = tuple(value.shape for value in state)

    def wanted_region(self) -> Region | None:
        region = self.region() if self.region is not None else None
        return region if region is not None and region.is_wanted else None

    def answering(self, recall: bool) -> AbstractContextManager[None]:
        """Return what a second forward runs under for the sake of shared evaluations."""
        if self.evaluations is None:
            return _NOTHING
        return self.evaluations.recalling() if recall else self.evaluations.filling()

    def given(self, state: State) -> State:
        """Return `state` as the inputs of a second run without a tape (See Rule 7)."""
        return tuple(value.clone() for value in state) if self.changes_input else state

    def taped(self, state: State) -> State:
        """Return `state` as the inputs of a second run with one."""
        inputs = tuple(
            value.detach().requires_grad_(flag)
            for value, flag in zip(state, self.requires_grad, strict=True)
        )
        if not self.changes_input:
            return inputs
        with torch.enable_grad():  # autograd allows no change of a leaf
            return tuple(value.clone() for value in inputs)


class _Run:
    """One forward of a chain and the backward that belongs to it."""

    def __init__(self, stages: Sequence[Stage], plan: Plan) -> None:
        self._stages = stages
        self._plan = plan
        self._records: list[_Record | None] = [None] * len(stages)
        self._swept: dict[int, tuple[Kept, ...]] = {}
        self._kept: dict[int, State] = {}
        self._inputs: dict[int, State] = {}
        self._working: tuple[int, State] = (-1, ())
        self._position = 0
        self._lock = threading.RLock()

    # -- forward ---------------------------------------------------------------------------

    def sweep(self, state: State) -> tuple[State, list[Tensor | None]]:
        """Execute the part of the schedule that belongs to forward (See Rule 1)."""
        plan = self._plan
        beside: list[Tensor | None] = [None] * len(self._stages)
        if not plan.inverted and plan.last_keep >= 0:
            self._swept[0] = self._keep(0, state)
        for position, action in enumerate(plan.actions[: plan.sweep_end]):
            match action:
                case Keep(at):
                    if at not in self._swept:
                        self._swept[at] = self._keep(at, state)
                case Drop(at):
                    self._drop(at)
                case Advance(start, stop):
                    for index in range(start, stop):
                        state, beside[index] = self._record(index, state)
                case Tape(index):
                    is_rerun = position < plan.last_keep
                    state, beside[index] = self._tape_in_sweep(index, state, is_rerun)
                case _:
                    raise ScheduleError(f"{action} cannot stand in the sweep of a schedule.")
        self._position = plan.sweep_end
        return state, beside

    def _keep(self, index: int, state: State) -> tuple[Kept, ...]:
        pair = pair_in_force()  # See Rule 5
        if index == len(self._stages):
            return tuple(Kept(value, "The output of the chain", pair) for value in state)
        stage = self._stages[index]
        if any(is_in_place(module) for module in stage.modules):
            state = tuple(value.detach().clone() for value in state)  # See Rule 7
        return tuple(Kept(value, f"The input of {stage.name}", pair) for value in state)

    def _tape_in_sweep(
        self, index: int, state: State, is_rerun: bool
    ) -> tuple[State, Tensor | None]:
        stage = self._stages[index]
        if not is_rerun:
            return stage.forward(state)
        record = self._records[index] = _Record(stage, state)
        with record.rerun.first():
            return self._first(index, record, state)

    def _record(self, index: int, state: State) -> tuple[State, Tensor | None]:
        stage = self._stages[index]
        state = tuple(
            value.view_as(value) if isinstance(value, nn.Parameter) else value for value in state
        )
        record = self._records[index] = _Record(stage, state)
        region = self._make_region(index)
        record.region = weakref.ref(region)
        if index not in self._plan.inverted:
            with record.rerun.first(), region.recording():
                return self._first(index, record, state)
        evaluations = record.evaluations = Evaluations(stage.name)
        make_region = partial(self._make_region, index)
        with record.rerun.first(), region.recording(), evaluations.recording(make_region):
            return self._first(index, record, state)

    def _first(self, index: int, record: _Record, state: State) -> tuple[State, Tensor | None]:
        """Run stage `index` for the first time, and see whether it changes what it is given."""
        versions = [value._version for value in state]
        result = self._stages[index].forward(state)
        if [value._version for value in state] != versions:
            record.changes_input = True
            stage = self._stages[index]
            is_copy = any(is_in_place(module) for module in stage.modules)
            if index in self._swept and not is_copy:
                raise ReplayError(
                    f"{stage.name} changes its input in place, and the schedule keeps that input. "
                    "Make it change a clone (for an activation, inplace=False)."
                )
        return result

    def _make_region(self, index: int) -> Region:
        return Region(self._stages[index].name, partial(self._demand, index), self._lock)

    # -- backward --------------------------------------------------------------------------

    def _demand(self, index: int) -> None:
        """Fill the slots of stage `index` (See Rules 2 and 3)."""
        target = self._plan.tape_at[index]
        try:
            with torch.no_grad():
                if index in self._inputs and target < self._position:
                    self._fill(index, self._inputs[index])
                    return
                if target < self._position:
                    self._restart()
                while self._position <= target:
                    action = self._plan.actions[self._position]
                    self._position += 1
                    self._execute(action, index)
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        """Let go of all that backward has made, so that the next demand begins anew."""
        self._position = len(self._plan.actions)
        self._working = (-1, ())
        self._kept.clear()
        self._inputs.clear()

    def _restart(self) -> None:
        """Bring back what the sweep kept, as far as backward has dropped it (See Rule 3)."""
        self._forget()
        if not self._plan.inverted:  # a run that inverts drops nothing that the sweep kept
            self._load(0)
            for action in self._plan.actions[: self._plan.last_keep + 1]:
                self._execute(action, -1)
        self._position = self._plan.sweep_end

    def _execute(self, action: Action, demanded: int) -> None:
        match action:
            case Keep(at):
                self._kept[at] = self._state_at(at)
            case Drop(at):
                self._drop(at)
            case Load(at):
                self._load(at)
            case Advance(start, stop):
                for index in range(start, stop):
                    self._advance(index)
            case Tape(index) if index <= demanded:
                self._tape(index)
            case Tape(index):
                self._advance(index)  # See Rule 6
            case Invert(index):
                self._invert(index, is_taped=index <= demanded)
            case Reverse(index):
                self._inputs.pop(index, None)  # autograd reverses; its slots are empty by now

    def _drop(self, index: int) -> None:
        self._kept.pop(index, None)
        # The source of a restart stays: the first state, or all that the sweep of a run that
        # inverts has kept, since backward keeps nothing on top of it.
        if index != 0 and not self._plan.inverted:
            self._swept.pop(index, None)

    def _state_at(self, index: int) -> State:
        at, state = self._working
        if at != index:
            raise ScheduleError(f"The schedule needs state {index} where it has state {at}.")
        return state

    def _load(self, index: int) -> None:
        state = self._kept.get(index)
        if state is None:
            # The pair beneath may give it once only (torch's checkpoint does).
            state = tuple(kept.get().detach() for kept in self._swept[index])
            self._kept[index] = state
        self._working = (index, state)

    def _recorded(self, index: int) -> _Record:
        record = self._records[index]
        if record is None:
            raise ScheduleError(f"The schedule runs {self._stages[index].name} a second time.")
        return record

    def _advance(self, index: int) -> None:
        record = self._recorded(index)
        state = record.given(self._state_at(index))
        with record.rerun.again():
            state, _ = self._stages[index].forward(state)
        self._working = (index + 1, tuple(value.detach() for value in state))

    def _tape(self, index: int) -> None:
        state = self._inputs[index] = self._state_at(index)
        self._working = (index + 1, self._fill(index, state))

    def _fill(self, index: int, state: State, *, recall: bool = False) -> State:
        """Run stage `index` again from its input and fill its slots; return its output."""
        record = self._recorded(index)
        inputs = record.taped(state)
        region = record.wanted_region()
        taping = torch.enable_grad() if region is None else region.filling(inputs)
        answering = record.answering(recall)
        with record.rerun.again(), taping, answering:
            output, _ = self._stages[index].forward(inputs)
        return tuple(value.detach() for value in output)

    def _invert(self, index: int, *, is_taped: bool) -> None:
        record = self._recorded(index)
        evaluations = record.evaluations
        if evaluations is None:
            raise ScheduleError(f"The schedule inverts {self._stages[index].name} unannounced.")
        after = self._state_at(index + 1)
        fills = is_taped and evaluations.are_shared
        try:
            with record.rerun.again(), evaluations.inverting(fills):
                state = _inverse(self._stages[index], record, after)
            self._working = (index, state)
            if record.rerun.has_foreign_draws:
                again = self._fill(index, state, recall=fills)
                _check_same(self._stages[index].name, again, after)
            elif is_taped and (not fills or record.wanted_region() is not None):
                del after
                self._fill(index, state, recall=fills)
            if is_taped:
                self._inputs[index] = state
        finally:
            evaluations.forget()


def _check_same(name: str, again: State, after: State) -> None:
    """Raise if the inverse drew otherwise than forward did: then forward makes another output."""
    for value, expected in zip(again, after, strict=True):
        allowed = torch.finfo(value.dtype).eps ** 0.5 * (1 + float(expected.abs().max()))
        if float((value - expected).abs().max()) > allowed:
            raise ReplayError(
                f"The inverse of {name} draws random numbers in another order than forward, so it "
                "does not undo it. Call the networks that draw through `self.evaluate(network, x)` "
                'in `forward` and `inverse`, or choose memory="sqrt".'
            )


def _inverse(stage: Stage, record: _Record, after: State) -> State:
    """Invert `stage`, and check what can be checked of what it returns."""
    versions = [value._version for value in after]
    before = tuple(value.detach() for value in stage.inverse(after))
    if [value._version for value in after] != versions:
        raise ReplayError(
            f"`inverse` of {stage.name} changed its input in place, which is the output that "
            "forward gave to the caller. Change a clone."
        )
    shapes = tuple(value.shape for value in before)
    if shapes != record.shapes:
        raise ReplayError(
            f"`inverse` of {stage.name} made shapes {[tuple(s) for s in shapes]} where forward "
            f"was given {[tuple(s) for s in record.shapes]}. An inverse must undo forward."
        )
    return before
