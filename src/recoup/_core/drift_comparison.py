"""Drift comparison: the states that inverses return against those of forward.

NOTE [ Compared states ]

Rule 1. Forward keeps a sketch of the input of each inverted stage (NOTE [ A sketch ]). The length
        of the difference of two sketches estimates the distance between what the inverse returns
        and the original.
Rule 2. A state that was too far off and is computed again from a kept one must be that of forward,
        but for rounding. Else the code is another one by now, which is an error.
Rule 3. A state is compared before autograd uses anything computed from it.
Rule 4. A tensor that passes a stage unchanged (an early latent, a context) is not sketched before
        that stage, but before the first stage that changes it, whose inverse returns it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from recoup._core.drift_guard import DriftGuard
from recoup._core.region import Stage
from recoup._core.sketch import Sketch, numbers_of, sketch_of, tolerance_of
from recoup._core.slots import State
from recoup.errors import DriftError


class DriftComparison:
    """The comparison of states over one forward and its backward.

    Args:
        guard: the guard of the chain.
        inverted: the indices of the stages that are inverted.
    """

    def __init__(self, guard: DriftGuard, inverted: Collection[int]) -> None:
        self._guard = guard
        self._inverted = inverted
        self._num_stages = len(inverted)
        self._not_inverted: tuple[int, ...] = ()
        self._sketches: dict[int, tuple[Sketch | None, ...]] = {}
        self._errors: dict[int, float] = {}
        self._sum = 0.0
        self._least = 0.0  # the largest machine epsilon of the states
        self._top = 0

    def sketch_input(self, index: int, state: State, output: State) -> None:
        """Sketch the input of a stage that backward will invert (See Rule 4)."""
        passed = set(map(id, output))
        self._sketches[index] = tuple(
            [None if id(value) in passed else _sketch_of(value) for value in state]
        )

    def end_forward(self, lowest: int) -> None:
        """Note where backward ends.

        Args:
            lowest: the lowest stage that backward can reach; those below are not inverted.
        """
        self._not_inverted = tuple(index for index in self._inverted if index < lowest)

    def begin_backward(self) -> None:
        """Clear the errors for a new backward."""
        self._errors = dict.fromkeys(self._not_inverted, 0.0)
        self._sum = 0.0
        self._guard.errors = self._errors
        self._guard._num_recomputed = 0

    def mark_exact(self, index: int) -> None:
        """Note that the working state at `index` is exact: kept or recomputed."""
        self._top = index

    def is_within(self, index: int, state: State, name: str) -> bool:
        """Whether a state that an inverse returned may be used; may raise or warn."""
        error = self._errors[index] = self._error_of(index, state)
        total = self._sum + error
        allowed = self._guard._allowance(len(self._errors), self._num_stages, self._least)
        if total <= allowed or not self._guard._objects(total, name):
            self._sum = total
            return True
        self._guard._refuse(index, error, name)
        return False

    def keep_from_now_on(self, index: int) -> int:
        """Choose a state to keep from the next forward on: the one at `index` was too far off.

        Returns:
            The spacing at which the recomputation of this backward keeps states.
        """
        rate = self._guard._allowance(1, self._num_stages, self._least, at_once=False)
        self._guard._learn(self._errors, index, self._top, rate)
        spacing = max(1, self._top - index)
        self._errors[index] = 0.0  # it is not used
        self._guard._num_recomputed += 1
        self._guard._say_if_most_are_kept(self._num_stages)
        return spacing

    def is_exact(self, index: int, state: State) -> bool:
        """Whether a state that was computed again is that of forward (See Rule 2)."""
        pairs = zip(self._sketches.get(index, ()), state, strict=False)
        return all(
            sketch is None or _distance(sketch, value) <= tolerance_of(value.dtype)
            for sketch, value in pairs
        )

    def _error_of(self, index: int, state: State) -> float:
        """Return the largest relative error of a tensor of `state` that was finite in forward."""
        worst = 0.0
        for sketch, value in zip(self._sketches.get(index, ()), state, strict=False):
            if sketch is not None and value.is_floating_point():
                worst = max(worst, _distance(sketch, value))
                self._least = max(self._least, torch.finfo(value.dtype).eps)
        return worst


def check_can_run_alone(stages: Sequence[Stage], drifted: str) -> None:
    """Raise if a stage is sharded: other ranks may see no drift, and would not run it again.

    Args:
        stages: the stages that would run again.
        drifted: the name of the stage whose inverse drifted.
    """
    for stage in stages:
        if any(hasattr(part, "unshard") for one in stage.modules for part in one.modules()):
            raise DriftError(
                f"The inverse of {drifted} drifted, and its input cannot be computed again: "
                f"{stage.name} is sharded, so that all ranks must run it together. Bound the scale "
                'of the layers, or use memory="sqrt".'
            )


def _sketch_of(value: Tensor) -> Sketch | None:
    """Return the sketch of a state: an inverse may deliver it in another layout in memory."""
    is_plain = value.layout is torch.strided and not value.is_contiguous()
    return sketch_of(value.detach().contiguous() if is_plain else value)


def _distance(sketch: Sketch, value: Tensor) -> float:
    """Return the distance of a tensor from the sketched one, over the length of that."""
    again = _sketch_of(value)
    if again is None:
        return 0.0
    before, after = numbers_of(sketch), numbers_of(again)
    was, distance = math.hypot(*before), math.dist(before, after)
    if not math.isfinite(was):
        return 0.0
    error = distance / was if was > 0 else distance
    return math.inf if math.isnan(error) else error
