"""Drift comparison: the states that inverses return against those of forward.

NOTE [ Sketches ]

Rule 1. Forward keeps a sketch of the input of each inverted stage: eight sums of its values under
        random signs. The difference of two sketches has the length of the difference of the two
        values, on average over the signs; so it estimates the distance between the inverse's
        result and the original to a factor of three.
Rule 2. Reading all of a large tensor would cost too much: a sketch samples 256 runs of eight
        values, spread evenly, at positions that move from stage to stage. The signs come from a
        fixed seed and are made again in backward. Each value has its own sign: a wrong inverse may
        be off by a constant everywhere, which signs shared by runs could cancel.
Rule 3. A state is compared before autograd uses anything computed from it, or the gradient of one
        stage would be wrong before the drift is found. Where the last backward was far within the
        tolerance, only every fourth stage is compared, and the last of each run of inverses, since
        nothing below it would show the error: a stage that was skipped counts with the error of
        the next compared one below it, and a warning is given if that one is too far off. Compiled
        stages are always compared: each stands for several modules.
Rule 4. A tensor that passes a stage unchanged (an early latent, a context) is not sketched before
        that stage, but before the first stage that changes it, whose inverse returns it. If stages
        are skipped, that one may be among them, so then the whole state is sketched. After a stage
        that is always compared it is enough to skip no stage that such a tensor comes to.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recoup._core.autocast_off import without_autocast
from recoup._core.drift_guard import DriftGuard
from recoup._core.random_sources import own_generator

__all__ = ["DriftComparison"]

_NUM_RUNS, _RUN = 256, 8
_EVERY = 4
_SEED = 0


class DriftComparison:
    """The comparison of states over one forward and its backward.

    Args:
        guard: the guard of the chain.
        inverted: the indices of the stages that are inverted.
    """

    __slots__ = (
        "_errors",
        "_every",
        "_guard",
        "_inverted",
        "_is_autocast",
        "_least",
        "_not_inverted",
        "_num_skipped",
        "_num_stages",
        "_owes",
        "_sketches",
        "_sum",
        "_tables",
        "_top",
    )

    def __init__(self, guard: DriftGuard, inverted: Collection[int]) -> None:
        self._guard = guard
        self._inverted = inverted
        self._num_stages = len(inverted)
        self._not_inverted: tuple[int, ...] = ()
        self._every = _EVERY if guard._is_calm(self._num_stages) else 1
        self._num_skipped = 0
        self._owes = False  # whether the last stage passed on tensors that were not sketched
        self._sketches: dict[int, tuple[Tensor | list[float] | None, ...]] = {}
        self._tables: dict[tuple[object, ...], _Table | None] = {}
        self._is_autocast = _is_autocast()
        self._errors: dict[int, float] = {}
        self._sum = 0.0
        self._least = 0.0  # the largest machine epsilon of the states
        self._top = 0

    def sketch_input(
        self,
        index: int,
        state: tuple[Tensor, ...],
        output: tuple[Tensor, ...],
        *,
        is_always: bool = False,
    ) -> None:
        """Sketch the input of a stage that backward will invert (See Rule 4).

        Args:
            index: the stage.
            state: its input.
            output: its output.
            is_always: whether it is compared wherever others are skipped.
        """
        is_compared = is_always or self._owes or not index % self._every
        if not is_compared and index - 1 in self._inverted:
            return
        is_enough = is_always or self._every == 1
        passed = {id(value) for value in output} if is_enough else set[int]()
        self._owes = any(id(value) in passed for value in state)
        sketches = (None if id(v) in passed else self._sketch(index, v) for v in state)
        # On other devices this would wait for the numbers.
        self._sketches[index] = tuple(
            _numbers(sketch) if sketch is not None and sketch.is_cpu else sketch
            for sketch in sketches
        )

    def end_forward(self, lowest: int) -> None:
        """Free the signs until backward (See Rule 2).

        Args:
            lowest: the lowest stage that backward can reach; those below are not inverted.
        """
        self._tables.clear()
        self._not_inverted = tuple(index for index in self._inverted if index < lowest)

    def begin_backward(self) -> None:
        """Clear the errors for a new backward."""
        self._errors = dict.fromkeys(self._not_inverted, 0.0)
        self._sum = 0.0
        self._num_skipped = 0
        self._guard.errors = self._errors
        self._guard._num_recomputed = 0
        self._is_autocast = _is_autocast()

    def mark_exact(self, index: int) -> None:
        """Note that the working state at `index` is exact: kept or recomputed."""
        self._top = index

    def is_within(self, index: int, state: tuple[Tensor, ...], name: str) -> bool:
        """Whether a state that an inverse returned may be used; may raise or warn."""
        if index not in self._sketches:
            self._num_skipped += 1
            self._errors[index] = 0.0
            return True
        error = self._error_of(index, state)
        for at in range(index, index + self._num_skipped + 1):
            self._errors[at] = error
        skipped, self._num_skipped = self._num_skipped, 0
        total = self._sum + (skipped + 1) * error
        allowed = self._guard._allowance(len(self._errors), self._num_stages, self._least)
        if total <= allowed or not self._guard._objects(total, name):
            self._sum = total
            return True
        self._guard._refuse(index, error, name)
        if skipped:
            self._guard._say_late(name)
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

    def _error_of(self, index: int, state: tuple[Tensor, ...]) -> float:
        """Return the largest relative error of a tensor of `state` that was finite in forward."""
        worst = 0.0
        for sketch, value in zip(self._sketches.get(index, ()), state, strict=False):
            again = None if sketch is None else self._sketch(index, value)
            if sketch is None or again is None:
                continue
            before = _numbers(sketch) if isinstance(sketch, Tensor) else sketch
            after = _numbers(again)
            was, difference = math.hypot(*before), math.dist(before, after)
            if math.isfinite(was):
                error = difference / was if was > 0 else difference
                worst = max(worst, math.inf if math.isnan(error) else error)
                self._least = max(self._least, torch.finfo(value.dtype).eps)
        return worst

    def _sketch(self, index: int, value: Tensor) -> Tensor | None:
        key = (value.shape, value.dtype, value.device)
        if key not in self._tables:
            self._tables[key] = _table_for(value)
        table = self._tables[key]
        if table is None or value.layout is not torch.strided:
            return None
        value = value.detach()
        if not value.is_contiguous():
            value = value.contiguous()
        start = value.storage_offset() + index * table.size[0] % table.num_starts
        sample = value.as_strided(table.size, table.stride, start)
        if not (table.is_half or self._is_autocast):
            return (sample * table.signs).sum(1)
        with without_autocast(value.device.type):
            return (sample.to(table.signs.dtype) * table.signs).sum(1)


class _Table(NamedTuple):
    """The sampling of tensors of one shape, dtype and device (See Rule 2)."""

    size: tuple[int, int]
    stride: tuple[int, int]
    num_starts: int
    is_half: bool
    signs: Tensor


def _table_for(value: Tensor) -> _Table | None:
    if not value.is_floating_point() or not value.numel():
        return None
    run = min(_RUN, value.numel())
    num_runs = min(_NUM_RUNS, value.numel() // run)
    every = value.numel() // num_runs
    is_half = value.dtype not in (torch.float32, torch.float64)
    generator = own_generator(value.device, _SEED)
    signs = torch.randint(2, (run, num_runs), generator=generator, device=value.device)
    signs = signs.mul_(2).sub_(1).to(torch.float32 if is_half else value.dtype)
    return _Table((run, num_runs), (1, every), every - run + 1, is_half, signs)


def _numbers(sketch: Tensor) -> list[float]:
    numbers: Any = sketch
    return numbers.tolist()


def _is_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
