"""The region of a call that is inverted: its input comes from its output, by its inverse.

NOTE [ An inverted call ]

Rule 1. An inverse runs without a graph; each network that it evaluates is a region beside this one,
        and fills its own slots (NOTE [ One evaluation ]).
Rule 2. Draws in an inverted call that no seed repeats come from the generators' state, in the order
        in which forward drew; its networks run again, in the order of forward. If the inverse draws
        in another order, it returns another input, which the drift guard sees. Without one, the
        output of the second forward is compared with that of the first.
Rule 3. An inverse may return the input of forward in another memory layout. It is then copied to
        the layout of forward, in which the second forward draws the same masks.
Rule 4. Residuals that are made from what an inverse returned differ by more than rounding. So they
        are not compared; the state is, by the drift guard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recoup._core.memory_layout import in_order, strides_of
from recoup._core.region import Region, Stage
from recoup._core.saved_tensors import detached, grad_mode, versions_of
from recoup._core.shared_evaluation import Evaluations
from recoup._core.slots import Filling, Owner, Recording, Residuals, State
from recoup.errors import ReplayError


class InvertedRegion(Region):
    """The record of the first run of a call, from which later runs repeat and invert it.

    Args:
        stage: the call.
        state: its input.
        index: the number by which its owner knows it.
    """

    def __init__(self, stage: Stage, state: State, index: int) -> None:
        super().__init__(stage, state, index, "invert")
        self._evaluations = Evaluations(stage.name)
        self._shapes = [value.shape for value in state]
        self._dtypes = [value.dtype for value in state]
        self._strides = strides_of(state)

    def record(self, state: State, owner: Owner, *, is_kept: bool = True) -> tuple[State, Any]:
        """Run the call and leave slots where it and its networks would have kept residuals."""
        recording = Recording(self, owner)
        with self.surroundings.first(), recording, self._evaluations.recording(self, owner):
            versions = versions_of(state)
            result = self.stage.forward(state)
            self.changes_input = versions_of(state) != versions
        return result

    @property
    def are_wanted(self) -> bool:
        """Whether autograd still holds any residual of the call, or of a network in it."""
        return super().are_wanted or self._evaluations.are_wanted

    def fill(
        self, state: State, *, needs_output: bool = True, residuals: Residuals | None = None
    ) -> State:
        """Run the call again from its input, and fill its slots."""
        if residuals is not None:  # of a run whose networks were not regions of their own
            return super().fill(state, needs_output=needs_output, residuals=residuals)
        return self._filled(state, recall=False, needs_output=needs_output)

    def _filled(self, state: State, *, recall: bool, needs_output: bool) -> State:
        inputs = self._inputs(state)
        output: State = ()
        answering = self._evaluations.answering(recall)
        # The evaluations are regions of their own, and a stop would leave some of them empty.
        filling = Filling(self, inputs, state, stops=recall and not needs_output)
        with self.surroundings.restored(), filling, answering:
            output, _ = self.stage.forward(inputs)
        return detached(output) if needs_output else ()

    def invert(self, after: State, *, is_taped: bool, is_compared: bool) -> State:
        """Return the input for an output, and fill slots if `is_taped`.

        Args:
            after: the output.
            is_taped: whether slots are filled.
            is_compared: whether the input is compared with that of forward, by the drift guard.
        """
        evaluations = self._evaluations
        has_foreign = self.surroundings.has_foreign
        recall = is_taped and evaluations.are_shared and not has_foreign
        try:
            with self.surroundings.restored(), grad_mode(False), evaluations.inverting(recall):
                state = self._inverse(after)
            if has_foreign and not is_compared:  # See Rule 2
                output = self._filled(state, recall=False, needs_output=True)
                self._check_same(output, after)
            elif is_taped and (not recall or super().are_wanted):
                del after  # a whole state, which `_filled` does not need
                self._filled(state, recall=recall, needs_output=False)
        finally:
            evaluations.forget()
        return state

    def _inverse(self, after: State) -> State:
        name = self.stage.name
        versions = versions_of(after)
        before = detached(self.stage.inverse(after))
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
        # Under autocast an inverse may return another type than forward was given.
        before = tuple(map(Tensor.to, before, self._dtypes))
        return in_order(before, self._strides)  # See Rule 3

    def _check_same(self, again: State, after: State) -> None:
        for value, expected in zip(again, after, strict=True):
            if _distance(value, expected) > torch.finfo(value.dtype).eps ** 0.5:
                raise ReplayError(
                    f"The inverse of {self.stage.name} draws random numbers in another order than "
                    "forward, so it does not undo it. Call the networks that draw through "
                    "`self.evaluate(network, x)` in `forward` and `inverse`, or choose "
                    'memory="sqrt".'
                )


def _distance(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).abs().max() / (1 + expected.abs().max()))
