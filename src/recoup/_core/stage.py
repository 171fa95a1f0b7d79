"""One stage of a chain: its first run, in forward, and the runs after it, in backward.

NOTE [ A stage runs again ]

Rule 1. A second run gets the inputs of the first as leaves with the same `requires_grad`, and runs
        with grad mode on, taped or not: what a module computes may depend on grad mode.
Rule 2. A stage may change its input in place, as an in-place activation does. Its later runs then
        get a copy. If it would change a state that the schedule keeps, or a view of one, its first
        run gets a copy too if the module is marked as in-place (its `inplace` is true); otherwise
        that is an error in forward.
Rule 3. An inverse runs without a graph; each network that it evaluates is taped separately.
Rule 4. Draws in an inverted stage that no seed repeats come from the generators' state, in the
        order in which forward drew. If the inverse draws in another order, the output of the
        second forward differs from that of the first, which is checked.
Rule 5. An inverse may return the input of forward in another memory layout. It is then copied to
        the layout of forward, in which the second forward draws the same masks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recoup._core.called_code import CalledCode
from recoup._core.closures import ClosureGuard
from recoup._core.filling import Filled, Filling
from recoup._core.guards import is_in_place
from recoup._core.inner_gradients import Advancing
from recoup._core.memory_layout import in_order, strides_of
from recoup._core.one_call import OneCallStage
from recoup._core.region import Owner, Region
from recoup._core.replay import Replay
from recoup._core.saved_tensors import (
    as_leaves,
    detached,
    grad_mode,
    requires_grad_of,
    versions_of,
)
from recoup._core.shared_evaluation import Evaluations
from recoup.errors import ChangedError, ReplayError

__all__ = ["Stage", "StageRun", "State", "is_marked_in_place", "with_views"]

State = tuple[Tensor, ...]


class Stage(Protocol):
    """One stage of a chain: the interface that the executor uses."""

    @property
    def name(self) -> str:
        """The name of the stage in error messages."""
        ...

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules whose parameters, buffers and modes the stage uses."""
        ...

    @property
    def part_names(self) -> Sequence[str]:
        """The names for the use of each module, if the stage is a group of stages; else none."""
        ...

    @property
    def code(self) -> object:
        """The code that the stage runs: a module, or the `CalledCode` of a function."""
        ...

    @property
    def closure_guard(self) -> ClosureGuard | None:
        """The values that a function reads beside its arguments; None for a module."""
        ...

    def forward(self, state: State) -> tuple[State, Any]:
        """Return the next state, and a second output outside the chain (a log-determinant)."""
        ...

    def inverse(self, state: State) -> State:
        """Return the state before this stage."""
        ...


class StageRun:
    """The record of the first run of one stage, from which later runs repeat it.

    Args:
        stage: the stage.
        state: its input.
        index: its place in the chain.
        is_inverted: whether later runs may get the input from the output.
    """

    __slots__ = (
        "_evaluations",
        "_region",
        "_replay",
        "_requires_grad",
        "_shapes",
        "_stage",
        "_strides",
        "changes_input",
        "index",
    )

    def __init__(self, stage: Stage, state: State, index: int, *, is_inverted: bool) -> None:
        self.index = index
        self._stage = stage
        self._replay = Replay(
            stage.name,
            stage.modules,
            stage.code,
            stage.closure_guard,
            stage.part_names,
            is_inverted=is_inverted,
        )
        self._region: weakref.ref[Region] | None = None
        self._evaluations = Evaluations(stage.name) if is_inverted else None
        self._requires_grad = list(map(requires_grad_of, state))
        self._shapes = [value.shape for value in state] if is_inverted else []
        self._strides = strides_of(state) if is_inverted else []
        self.changes_input = False

    # -- the first run ---------------------------------------------------------------------

    def tape(self, state: State) -> tuple[State, Any]:
        """Run the stage with its residuals kept, so that it can still be run again."""
        first = self._replay.first()
        with first.lock, first:
            return self._forward(state)

    def record(self, state: State, owner: Owner) -> tuple[State, Any]:
        """Run the stage and leave slots where it would have kept residuals; `owner` fills them."""
        for value in state:
            # It would be mistaken for one of the stage's own.
            if type(value) is not Tensor and isinstance(value, nn.Parameter):
                state = with_views(state)
                break
        first_run = self._replay.first_run()
        name, evaluations = self._stage.name, self._evaluations
        is_whole = False
        try:
            if evaluations is None:
                region = Region(name, owner, self.index, first_run)
                region.is_looked_at = self._replay.decisions is not None
                self._region = weakref.ref(region)
                first = self._replay.first(region.slots.__len__)
                with first.lock, region.recording(first):
                    result = self._forward(state)
            else:
                region = Region(name, owner, self.index, first_run, "invert")
                self._region = weakref.ref(region)
                first = self._replay.first()
                with first.lock, evaluations.recording(region, region.recording(first)):
                    result = self._forward(state)
            is_whole = True
        finally:
            first_run.end(is_whole=is_whole)
        return result

    def _forward(self, state: State) -> tuple[State, Any]:
        versions = versions_of(state)
        result = self._stage.forward(state)
        self.changes_input = versions_of(state) != versions
        return result

    @property
    def is_wanted(self) -> bool:
        """Whether autograd still holds any residual of the stage, or of a network in it."""
        evaluations = self._evaluations
        return self._wanted_region() is not None or (
            evaluations is not None and evaluations.are_wanted
        )

    @property
    def inputs(self) -> State | None:
        """The inputs of a taped run, which the last slot of the stage frees; None without one."""
        region = self._region() if self._region is not None else None
        if region is None or region.inputs is None:
            return None
        if versions_of(region.inputs) != region.input_versions:
            raise ChangedError(
                f"The input of {self._stage.name} was changed in place between two backwards, so "
                "the second would see other values than forward did. Change a clone."
            )
        return region.inputs

    @inputs.setter
    def inputs(self, inputs: State | None) -> None:
        region = self._region() if self._region is not None else None
        if region is not None:
            region.inputs = inputs
            region.input_versions = [] if inputs is None else versions_of(inputs)

    # -- later runs ------------------------------------------------------------------------

    def advance(self, state: State) -> State:
        """Run the stage again from its input, without a tape."""
        inputs = self._inputs(state)
        advancing = Advancing(self._stage.name, self._replay.first_run())
        again = self._replay.again(advancing.num_saves)
        with again.lock, again, advancing:
            output, _ = self._stage.forward(inputs)
        return detached(output)

    def fill(self, state: State, *, needs_output: bool = True) -> State:
        """Run the stage again from its input, and fill its slots.

        If the output is not needed, the run may end at the last slot and returns an empty state.
        """
        return self._filled(state, recall=False, needs_output=needs_output)

    def _filled(self, state: State, *, recall: bool, needs_output: bool) -> State:
        stage: Any = self._stage
        one_call: OneCallStage | None = stage if getattr(stage, "is_one_call", False) else None
        if one_call is not None:
            again = self._replay.again()
            with grad_mode(False), again.lock, again:
                one_call.differentiate(state[: one_call.num_inputs])
            self._put(state[: one_call.num_inputs])
            return ()
        inputs = self._inputs(state)
        evaluations = self._evaluations
        region = self._wanted_region()
        filling: Filling | None = None
        if region is not None:
            # The evaluations are regions of their own, and a stop would leave some of them empty.
            stops = not needs_output and (evaluations is None or recall)
            filling = Filling(region, inputs, stops=stops)
        stops = filling is not None and filling.last >= 0
        again = self._replay.again(None if filling is None else filling.num_saves, stops=stops)
        try:
            if filling is None:
                around = again if evaluations is None else evaluations.answering(recall, again)
                with again.lock, around, grad_mode(True):
                    output, _ = self._stage.forward(inputs)
            else:
                filling.around = again
                around = filling if evaluations is None else evaluations.answering(recall, filling)
                with again.lock, around:
                    output, _ = self._stage.forward(inputs)
        except Filled as filled:
            if filled.region is not region:
                raise
            return ()
        return detached(output) if needs_output else ()

    def invert(self, after: State, *, is_taped: bool) -> State:
        """Invert the stage from its output, and fill its slots if `is_taped`."""
        evaluations = self._evaluations
        if evaluations is None:
            raise ReplayError(f"{self._stage.name} did not run as a stage to be inverted.")
        stage: Any = self._stage
        one_call: OneCallStage | None = stage if getattr(stage, "is_one_call", False) else None
        if one_call is not None:
            again = self._replay.again()
            with grad_mode(False), again.lock, again:
                state = self._inverse(after)
            if is_taped:
                self._put(state[: one_call.num_inputs])
            return state
        recall = is_taped and evaluations.are_shared
        again = self._replay.again()
        try:
            with grad_mode(False), again.lock, evaluations.inverting(recall, again):
                state = self._inverse(after)
            if self._replay.has_foreign_draws:  # See Rule 4
                output = self._filled(state, recall=recall, needs_output=True)
                self._check_same(output, after)
            elif is_taped and (not recall or self._wanted_region() is not None):
                del after  # a whole state, which `_filled` does not need
                self._filled(state, recall=recall, needs_output=False)
        finally:
            evaluations.forget()
        return state

    def _put(self, inputs: State) -> None:
        """Fill the slots of a stage that is reversed in one call: it saves its inputs alone."""
        region = self._wanted_region()
        if region is not None:
            filling = Filling(region, inputs)
            with filling:
                filling.put(inputs)

    def _wanted_region(self) -> Region | None:
        region = self._region() if self._region is not None else None
        return region if region is not None and region.is_wanted else None

    def _inputs(self, state: State) -> State:
        inputs = as_leaves(state, self._requires_grad)
        if not self.changes_input:
            return inputs
        with grad_mode(True):  # autograd allows no change of a leaf
            return tuple([value.clone() for value in inputs])

    def _inverse(self, after: State) -> State:
        name = self._stage.name
        versions = versions_of(after)
        before = detached(self._stage.inverse(after))
        if versions_of(after) != versions:
            raise ReplayError(
                f"`inverse` of {name} changed its input in place, which is the output that forward "
                "gave to the caller. Change a clone."
            )
        shapes = [value.shape for value in before]
        if shapes != self._shapes:
            raise ReplayError(
                f"`inverse` of {name} made shapes {[tuple(s) for s in shapes]} where forward was "
                f"given {[tuple(s) for s in self._shapes]}. An inverse must undo forward."
            )
        return in_order(before, self._strides)  # See Rule 5

    def _check_same(self, again: State, after: State) -> None:
        for value, expected in zip(again, after, strict=True):
            allowed = torch.finfo(value.dtype).eps ** 0.5 * (1 + float(expected.abs().max()))
            if float((value - expected).abs().max()) > allowed:
                raise ReplayError(
                    f"The inverse of {self._stage.name} draws random numbers in another order than "
                    "forward, so it does not undo it. Call the networks that draw through "
                    "`self.evaluate(network, x)` in `forward` and `inverse`, or choose "
                    'memory="sqrt".'
                )


def is_marked_in_place(stage: Stage) -> bool:
    """Whether the module of `stage` says that it changes its input in place (See Rule 2)."""
    code = stage.code.codes[0] if isinstance(stage.code, CalledCode) else stage.code
    return isinstance(code, nn.Module) and is_in_place(code)


def with_views(state: State) -> State:
    """Return `state` with views of its parameters: one of each, wherever it is in the state."""
    views = {id(each): each.view_as(each) for each in state if isinstance(each, nn.Parameter)}
    return tuple([views.get(id(each), each) for each in state])
