"""The drift guard: how far from forward's values an inverse arrives, and what then.

NOTE [ Drift ]

Rule 1. Inverses round, and each magnifies the error that it is given. Forward leaves of the input
        of each inverted stage a sketch: its scalar products with a few random directions. The
        difference of two sketches has the length of the difference of the two values, on average
        over the directions, so it says how far what the inverse delivers is from what was there, to
        a factor of three.
Rule 2. Reading all of a large value costs more than the guard is worth: of such a value a sketch
        sees 512 short runs, spread evenly, at places that move from stage to stage. Directions are
        signs from a fixed seed; they are made anew in backward.
Rule 3. A value is compared before autograd is given anything that was made of it, or the gradient
        of one stage would be wrong before the guard knew.
Rule 4. What passes a stage by (early latents, a context) is not sketched before that stage, but
        before the first one that does change it: that inverse is what delivers it.
Rule 5. A stage whose input comes out too far is run again from its true input, had by running the
        stages before it from the nearest kept state. From the errors on the way the guard learns
        where the next forward is to keep a state, so that this happens once: it marks the stage
        as one to be recomputed, whose input a schedule keeps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from recoup.errors import DriftError
from recoup.residuals.sources import own_generator
from recoup.schedules import Way

__all__ = ["Drift", "DriftGuard", "Watch"]

Otherwise = Literal["recompute", "raise", "warn", "ignore"]

_NUM_DIRECTIONS = 8
_NUM_RUNS, _RUN = 512, 8
_ROUNDINGS = 8
_SEED = 0
# A state is kept where the error is still this much smaller than the tolerance: weights move from
# one step to the next, and the error with them.
_MARGIN = 4.0


class DriftGuard:
    """What to do in backward where an inverse does not find its way back, and what was seen.

    Kept for backward: 32 bytes a stage and tensor of its state, and, where the guard recomputes,
    the first state of the chain and those it has learned to keep. Backward pays one pass over each
    state, and where an error was too large, a recomputation.

    Args:
        otherwise: what happens past the tolerance. "recompute": the stage is run from its true
            input, which is computed again from the nearest kept state; from the next forward on,
            states are kept where the errors seen say so. "raise" a `DriftError`. "warn", once.
            "ignore": nothing is measured.
        tolerance: the largest error of a state, relative to the state, that is let pass; of half
            precision at least eight times its rounding. In stiff nets gradients were off by ten to
            fifty times as much, in ordinary ones by less than the error.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> from recoup.invertible import ActNorm, Chain, DriftGuard, Flip
        >>> guard = DriftGuard("raise")
        >>> chain = Chain(ActNorm(2), Flip(), memory="constant", drift=guard)
        >>> y, log_det = chain(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
        >>> y.sum().backward()
        >>> guard.largest_error < 1e-6
        True

    Behrmann et al., "Understanding and mitigating exploding inverses in invertible neural
    networks", https://arxiv.org/abs/2006.09347.
    """

    def __init__(self, otherwise: Otherwise = "recompute", tolerance: float = 2e-5) -> None:
        if otherwise not in get_args(Otherwise):
            raise ValueError(
                f'`drift` is {otherwise!r}, but must be "recompute", "raise", "warn", "ignore" or '
                "a DriftGuard."
            )
        if not 0 < tolerance < 1:
            raise ValueError(f"`tolerance` is {tolerance}, but must lie between 0 and 1.")
        self.otherwise: Otherwise = otherwise
        self.tolerance = tolerance
        self.errors: dict[int, float] = {}
        self.kept: frozenset[int] = frozenset()
        self._has_warned = False

    @classmethod
    def of(cls, drift: Drift) -> DriftGuard:
        """Return the guard that `drift` means: itself, or one that does what it says."""
        return drift if isinstance(drift, DriftGuard) else cls(drift)

    @property
    def largest_error(self) -> float:
        """The largest relative error of a state that the last backward was given by inverses."""
        return max(self.errors.values(), default=0.0)

    def reset(self) -> None:
        """Forget the errors and where states are kept, after weights have changed much."""
        self.errors = {}
        self.kept = frozenset()

    def ways(self, ways: Sequence[Way]) -> tuple[Way, ...]:
        """Return the ways of the stages of a chain, with those recomputed whose input is kept."""
        if self.otherwise != "recompute":
            return tuple(ways)
        # The states from which others are computed again: that before each run of inverses, where
        # the stage before it cannot be run again, and those learned.
        return tuple(
            "recompute"
            if way == "invert" and (at == 0 or ways[at - 1] == "keep" or at in self.kept)
            else way
            for at, way in enumerate(ways)
        )

    def watch(self) -> Watch | None:
        """Return what watches one forward and its backward; None if nothing is measured."""
        return None if self.otherwise == "ignore" else Watch(self)

    def judge(self, error: float, name: str) -> bool:
        """Whether a state with this error must be recomputed; or raise, or warn."""
        if error <= self.tolerance or self.otherwise == "ignore":
            return False
        if self.otherwise == "recompute":
            return True
        text = (
            f"The inverse of {name} delivered its input with a relative error of {error:.1e}, more "
            f"than the `tolerance` {self.tolerance:g} of the drift guard, so gradients may be off "
            'by as much and more. Use drift="recompute", or bound the scale of the layers.'
        )
        if self.otherwise == "raise":
            raise DriftError(text)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, stacklevel=2)
        return False

    def learn(self, errors: dict[int, float], index: int, top: int) -> None:
        """Take down where a state is to be kept, after that at `index` came out too far.

        Args:
            errors: of the states that inverses delivered, from `top` down.
            index: the state that was too far.
            top: the lowest state above it that was exact.
        """
        good = [at for at in range(index + 1, top) if errors[at] * _MARGIN <= self.tolerance]
        place = good[0] if good else min(index + 1, top - 1)
        self.kept |= {place}

    def __repr__(self) -> str:
        return f"DriftGuard({self.otherwise!r}, tolerance={self.tolerance:g})"

    def __str__(self) -> str:
        if not self.errors:
            return f"{self!r}: nothing was inverted yet"
        worst = max(self.errors, key=lambda at: self.errors[at])
        kept = f"; states kept: {len(self.kept)}" if self.kept else ""
        return (
            f"{self!r}: largest relative error {self.errors[worst]:.1e}, before stage {worst} of "
            f"{max(self.errors) + 1}{kept}"
        )


Drift = Otherwise | DriftGuard


class Watch:
    """The guard over one forward and its backward."""

    __slots__ = ("_directions", "_errors", "_sketches", "_top", "guard")

    def __init__(self, guard: DriftGuard) -> None:
        self.guard = guard
        self._sketches: dict[int, tuple[Tensor | None, ...]] = {}
        self._directions: dict[tuple[object, ...], Tensor] = {}
        self._errors: dict[int, float] = {}
        self._top = 0

    def see(self, index: int, state: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        """Take down the input of a stage that is to be inverted (See Rule 4)."""
        passed = {id(value) for value in output}
        self._sketches[index] = tuple(
            None if id(value) in passed else self._sketch(index, value) for value in state
        )

    def end_forward(self) -> None:
        """Let go of the directions until backward (See Rule 2)."""
        self._directions.clear()

    def begin_backward(self) -> None:
        """Say that the errors of a new backward follow."""
        self._errors = {}
        self.guard.errors = self._errors

    def is_exact(self, index: int) -> None:
        """Say that the working state is a kept one."""
        self._top = index

    def is_within(self, index: int, state: tuple[Tensor, ...], name: str) -> bool:
        """Whether a state that an inverse delivered may be used; or raise, or warn."""
        return not self.guard.judge(self._error_of(index, state), name)

    def _error_of(self, index: int, state: tuple[Tensor, ...]) -> float:
        """Return the largest relative error of a part that was finite to begin with.

        What is no more than the rounding of its type, which no way of running avoids, counts as 0.
        """
        measured = beyond = 0.0
        for sketch, value in zip(self._sketches.get(index, ()), state, strict=False):
            again = None if sketch is None else self._sketch(index, value)
            if sketch is None or again is None:
                continue
            was, difference = _squares(sketch, again - sketch)
            if math.isfinite(was):
                error = math.sqrt(difference / was) if was > 0 else math.sqrt(difference)
                error = math.inf if math.isnan(error) else error
                measured = max(measured, error)
                if not error <= _ROUNDINGS * torch.finfo(value.dtype).eps:
                    beyond = max(beyond, error)
        self._errors[index] = measured
        return beyond

    def learn(self, index: int) -> int:
        """Take down that the state at `index` was too far; return how far an inverse may go."""
        self.guard.learn(self._errors, index, self._top)
        spacing = max(1, self._top - index)
        self._top = index
        return spacing

    def _sketch(self, index: int, value: Tensor) -> Tensor | None:
        if not value.is_floating_point() or value.layout is not torch.strided or not value.numel():
            return None
        sample = _sampled(value.detach().reshape(-1), index)
        if sample.dtype not in (torch.float32, torch.float64):
            sample = sample.float()
        directions = self._directions_for(sample)
        if not torch.is_autocast_enabled(sample.device.type):
            return directions @ sample
        with torch.autocast(sample.device.type, enabled=False):
            return directions @ sample

    def _directions_for(self, sample: Tensor) -> Tensor:
        key = (sample.shape, sample.dtype, sample.device)
        found = self._directions.get(key)
        if found is None:
            generator = own_generator(sample.device, _SEED)
            size = (_NUM_DIRECTIONS, len(sample))
            signs = torch.randint(2, size, generator=generator, device=sample.device)
            found = self._directions[key] = signs.mul_(2).sub_(1).to(sample.dtype)
        return found


def _sampled(flat: Tensor, index: int) -> Tensor:
    """Take runs of a large value, at places that move with the stage (See Rule 2)."""
    if flat.numel() <= 2 * _NUM_RUNS * _RUN:
        return flat
    every = flat.numel() // _NUM_RUNS
    start = index * _RUN % (every - _RUN + 1)
    runs = flat.narrow(0, 0, _NUM_RUNS * every).view(_NUM_RUNS, every).narrow(1, start, _RUN)
    return runs.reshape(-1)


def _squares(*sketches: Tensor) -> list[float]:
    squares: Any = torch.stack(sketches).square().sum(1)
    return squares.tolist()
