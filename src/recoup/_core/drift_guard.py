"""The drift guard: how far inverses may be from the values of forward, and what follows.

NOTE [ Drift ]

Rule 1. Inverses round, and each magnifies the error of its input. So the guard bounds the sum of
        the relative errors of the states that inverses returned by a fifth of the tolerance. In
        ordinary chains gradients were off by a tenth of that sum, and in stiff ones by once or
        twice it; one in twenty of these by more than five times, where a rounding error of the
        input changes gradients by percents. A tighter bound would recompute states of ordinary
        chains of 64 couplings.
Rule 2. The sum may grow in proportion to the stages done, which leaves the stages to come their
        share; a tenth of the allowance may be used at once.
Rule 3. A stage whose input is too far off is run again from its true input, which comes from
        running the stages before it from the nearest kept state. From the errors seen on the way
        the guard learns where the next forward must keep a state: it marks the stage as one to
        recompute, and a schedule keeps the input of those.
Rule 4. Recomputed states are right, so a plainly wrong inverse costs only bytes and time, and so
        does one that fails: a spline may refuse what is a rounding beyond its bounds. (A warning
        says so, since sampling will fail, too; another one, that most states have to be kept.)

NOTE [ Compared states ]

Rule 1. Forward keeps a sketch of the input of each inverted stage (NOTE [ A sketch ]), which tells
        how far what the inverse returns is from the original.
Rule 2. A state that is computed again from a kept one must be that of forward, but for rounding.
        Else the code is another one by now, which is an error.
Rule 3. A state is compared before autograd uses anything computed from it.
Rule 4. A tensor that passes a stage unchanged (an early latent, a context) is not sketched before
        that stage, but before the first stage that changes it, whose inverse returns it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from recoup._arguments import check_real
from recoup._core.modules import is_gathered
from recoup._core.settings import replaced
from recoup._core.sketch import Sketch, numbers_of, sketch_of, tolerance_of
from recoup.errors import DriftError, RecoupError, ReplayError
from recoup.schedules import Way

Otherwise = Literal["recompute", "raise", "warn", "ignore"]

_PER_ERROR = 5
_ROUNDINGS = 8
_AT_ONCE = 0.1
# Mistakes in the code of an inverse, and what its input cannot mend.
_NOT_OF_VALUES = (AttributeError, NameError, NotImplementedError, TypeError, torch.OutOfMemoryError)
_OF_SINGLES = torch.finfo(torch.float32).eps
# A state is kept where the errors are still smaller than allowed by this factor: weights change
# from one step to the next, and the errors with them.
_MARGIN = 2.0


class DriftGuard:
    """The policy for inverses that drift in backward, and a record of their errors.

    Kept for backward: sixteen numbers a stage and tensor of its state, and, where the guard
    recomputes, the first state of the chain and those it has learned to keep. Backward pays for
    comparing each state, and where errors were too large, for a recomputation. A guard
    is for one chain, whose errors it remembers.

    Args:
        otherwise: what to do past the tolerance. "recompute": run the stage from its true input,
            which is computed again from the nearest kept state; from the next forward on, keep
            states where the errors seen require it. "raise": raise a `DriftError`. "warn": warn,
            once. "ignore": measure nothing.
        tolerance: the relative error that gradients may have, as estimated: the relative errors of
            the states that inverses return may add up to a fifth of it, or to eight roundings a
            stage where these are more (in 16 bits, and then a warning says so).

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> import torch
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

    def __init__(self, otherwise: Otherwise = "recompute", tolerance: float = 1e-3) -> None:
        if otherwise not in get_args(Otherwise):
            raise ValueError(
                f'`drift` is {otherwise!r}, but must be "recompute", "raise", "warn", "ignore" or '
                "a DriftGuard."
            )
        check_real(tolerance=tolerance)
        if not 0 < tolerance < 1:
            raise ValueError(f"`tolerance` is {tolerance}, but must lie between 0 and 1.")
        self.otherwise: Otherwise = otherwise
        self.tolerance = tolerance
        self.errors: dict[int, float] = {}
        self.refused: dict[int, float] = {}
        self.kept: frozenset[int] = frozenset()
        # Of the refused states: the error, and the stage whose input it is.
        self._worst: tuple[float, str] = (0.0, "")
        self._num_inverses = 0  # of the chain, if no state were kept
        self._warned: set[str] = set()  # of what it has warned, once

    @classmethod
    def of(cls, drift: Drift) -> DriftGuard:
        """Return `drift` if it is a guard, or else a new guard with that policy."""
        return drift if isinstance(drift, DriftGuard) else cls(drift)

    def anew(self) -> DriftGuard:
        """Return a new guard with the same settings, for another chain."""
        return DriftGuard(self.otherwise, self.tolerance)

    @property
    def largest_error(self) -> float:
        """The largest relative error of a state that an inverse returned.

        Counted are the states that the last backward used, and those that were refused since
        `reset` and computed again: infinitely large where an inverse failed.
        """
        return max((*self.errors.values(), *self.refused.values()), default=0.0)

    @property
    def total_error(self) -> float:
        """The sum of the errors of the states that the last backward used.

        It may be up to a fifth of the tolerance; refused states do not count.
        """
        return sum(self.errors.values())

    def reset(self) -> None:
        """Forget the errors and the places of kept states, after weights have changed much."""
        self.errors = {}
        self.refused = {}
        self.kept = frozenset()
        self._worst = (0.0, "")
        self._warned.discard("most")

    def _warn(self, about: str, text: str) -> None:
        """Warn of something once."""
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(text, stacklevel=3)

    def ways(self, ways: Sequence[Way]) -> tuple[Way, ...]:
        """Return `ways` with "recompute" for each inverted stage whose input must be kept."""
        self._num_inverses = sum(way == "invert" for way in ways)
        if self.otherwise != "recompute":
            return tuple(ways)
        # The states from which others are recomputed: the one before each run of inverses where
        # the stage before it cannot be run again, and those that the guard has learned to keep.
        return tuple(
            "recompute"
            if way == "invert" and (at == 0 or ways[at - 1] == "keep" or at in self.kept)
            else way
            for at, way in enumerate(ways)
        )

    @staticmethod
    def strict() -> AbstractContextManager[None]:
        """Return a context in which guards raise where they would recompute, in all threads.

        For tests of invertible layers, where a recomputed state would hide a wrong inverse.

        Example:
            >>> import torch
            >>> from recoup.invertible import ActNorm, Chain, DriftGuard
            >>> chain = Chain(ActNorm(2), ActNorm(2), memory="constant")
            >>> with DriftGuard.strict():
            ...     chain(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))[0].sum().backward()
        """
        return replaced(_Strict, "is_on", True)

    def __repr__(self) -> str:
        return f"DriftGuard({self.otherwise!r}, tolerance={self.tolerance:g})"

    def __str__(self) -> str:
        if not self.errors and not self.refused:
            return f"{self!r}: nothing was inverted yet"
        said: list[str] = []
        if self.errors:
            worst = max(self.errors, key=lambda at: self.errors[at])
            said.append(
                f"relative errors add up to {self.total_error:.1e}, the largest "
                f"{self.errors[worst]:.1e} before stage {worst} of {max(self.errors) + 1}"
            )
        if self.kept:
            said.append(f"states kept: {len(self.kept)}")
        if self.refused:
            said.append(
                f"states refused and computed again: {len(self.refused)}, off by up to "
                f"{self._worst[0]:.1e} (the input of {self._worst[1]})"
            )
        return f"{self!r}: {'; '.join(said)}"


class _Strict:
    is_on = False


Drift = Otherwise | DriftGuard


class DriftComparison:
    """The comparison of states over one forward and its backward (NOTE [ Compared states ])."""

    def __init__(self, guard: DriftGuard, inverted: Collection[int]) -> None:
        self._guard, self._inverted = guard, inverted
        self._not_inverted: tuple[int, ...] = ()
        self._sketches: dict[int, tuple[Sketch | None, ...]] = {}
        self._errors: dict[int, float] = {}
        self._sum = 0.0
        self._least = 0.0  # the largest machine epsilon of the states
        self._top = 0  # the lowest state that was exact

    def sketch_input(self, index: int, state: Sequence[Tensor], output: Sequence[Tensor]) -> None:
        """Sketch the input of a stage that backward will invert (See Rule 4)."""
        passed = set(map(id, output))
        self._sketches[index] = tuple(
            [None if id(value) in passed else _sketch_of(value) for value in state]
        )

    def end_forward(self, lowest: int) -> None:
        """Note the lowest stage that backward can reach; those below are not inverted."""
        self._not_inverted = tuple(index for index in self._inverted if index < lowest)

    def begin_backward(self) -> None:
        """Clear the errors for a new backward."""
        self._guard.errors = self._errors = dict.fromkeys(self._not_inverted, 0.0)
        self._sum = 0.0

    def mark_exact(self, index: int) -> None:
        """Note that the working state at `index` is exact: kept or recomputed."""
        self._top = index

    def is_within(self, index: int, state: Sequence[Tensor], name: str) -> bool:
        """Whether a state that an inverse returned may be used; may raise or warn."""
        guard, error = self._guard, 0.0
        for sketch, value in zip(self._sketches.get(index, ()), state, strict=False):
            if sketch is not None and value.is_floating_point():
                error = max(error, _distance(sketch, value))
                self._least = max(self._least, torch.finfo(value.dtype).eps)
        self._errors[index] = error
        floor = len(self._inverted) * _ROUNDINGS * self._least
        if self._least > _OF_SINGLES and floor > guard.tolerance:
            guard._warn(
                "type",
                f"Inverses in 16 bits round by more than the `tolerance` of {guard.tolerance:g}: "
                f"relative errors are accepted that add up to {floor:.1g}. Keep the states of the "
                'chain in torch.float32 (under autocast they are), or use memory="sqrt".',
            )
        total, num_done = self._sum + error, len(self._errors)
        allowed = self._allowance(num_done, max(num_done / max(len(self._inverted), 1), _AT_ONCE))
        if total > allowed:
            if guard.otherwise == "recompute" and not _Strict.is_on:
                guard.refused[index] = max(error, guard.refused.get(index, 0.0))
                guard._worst = max(guard._worst, (error, name))
                return False
            text = (
                f"Inverses drifted: with the input of {name} the relative errors of what they "
                f"delivered add up to {total:.1e}, so that gradients may be off by more than the "
                f'`tolerance` of {guard.tolerance:g}. Use drift="recompute", or bound the scale of '
                "the layers. An inverse that draws must draw in the order of forward."
            )
            if guard.otherwise != "warn":
                raise DriftError(text)
            guard._warn("drift", text)
        self._sum = total
        return True

    def takes_failure(self, index: int, name: str, error: Exception) -> bool:
        """Whether an input is computed again because its inverse failed (See Rule 4)."""
        guard = self._guard
        is_ours = isinstance(error, RecoupError) and not isinstance(error, ReplayError)
        if is_ours or isinstance(error, _NOT_OF_VALUES):
            return False
        if guard.otherwise != "recompute" or _Strict.is_on:
            return False
        guard._warn(
            "failed",
            f"Inverting {name} failed, on a value that is a rounding away from that of forward or "
            f"always: {type(error).__name__}: {error}. So its input, and that of others that fail, "
            "is computed again from a kept state, and is kept from then on.",
        )
        guard.refused[index], guard._worst = math.inf, (math.inf, name)
        return True

    def _allowance(self, num_done: int, share: float) -> float:
        """Return the largest sum of errors of so many stages, a share of all (See Rule 2)."""
        tolerance = share * self._guard.tolerance / _PER_ERROR
        return max(tolerance, num_done * _ROUNDINGS * self._least)

    def keep_from_now_on(self, index: int, *, has_failed: bool = False) -> int:
        """Choose a state to keep from the next forward on: the one at `index` was too far off.

        If the inverse has failed, it is that state. Returns the spacing at which the recomputation
        of this backward keeps states.
        """
        guard, top = self._guard, self._top
        rate = self._allowance(1, 1 / max(len(self._inverted), 1))  # if all stages have the same
        place, total = min(index + 1, top - 1), 0.0
        for at in range(top - 1, index, -1):
            total += self._errors.get(at, 0.0)
            if total * _MARGIN <= rate * (top - at):
                place = at
        guard.kept |= {index if has_failed else place}
        self._errors[index] = 0.0  # it is not used
        num_inverses = max(guard._num_inverses, len(self._inverted))
        if 2 * len(guard.kept) > num_inverses:
            error, name = guard._worst
            guard._warn(
                "most",
                f"Most states of this chain must be kept, {len(guard.kept)} or more of "
                f"{num_inverses}: what inverses deliver is too far from what forward was given, "
                f"most of all the input of {name}, by {error:.1e} of itself. If its `inverse` does "
                "not undo `forward`, mend it (recoup.invertible.check_invertible tells). If the "
                'layers are stiff, bound their scales, or use memory="sqrt". The gradients are '
                "right, at the price of bytes and seconds.",
            )
        return max(1, top - index)

    def is_exact(self, index: int, state: Sequence[Tensor]) -> bool:
        """Whether a state that was computed again is that of forward (See Rule 2)."""
        pairs = zip(self._sketches.get(index, ()), state, strict=False)
        return all(
            sketch is None or _distance(sketch, value) <= tolerance_of(value.dtype)
            for sketch, value in pairs
        )


def check_can_run_alone(name: str, modules: Sequence[nn.Module], drifted: str) -> None:
    """Raise if a stage is sharded: other ranks may see no drift, and would not run it again."""
    if any(is_gathered(part) for module in modules for part in module.modules()):
        raise DriftError(
            f"The inverse of {drifted} drifted, and its input cannot be computed again: {name} is "
            "sharded, so that all ranks must run it together. Bound the scale of the layers, or "
            'use memory="sqrt".'
        )


def _sketch_of(value: Tensor) -> Sketch | None:
    """Return the sketch of a state: an inverse may deliver it in another layout in memory."""
    is_plain = value.layout is torch.strided and not value.is_contiguous()
    return sketch_of(value.detach().contiguous() if is_plain else value)


def _distance(sketch: Sketch, value: Tensor) -> float:
    """Return the distance of a tensor from the sketched one, over the length of that."""
    again = _sketch_of(value)
    before, after = numbers_of(sketch), numbers_of(sketch if again is None else again)
    was, distance = math.hypot(*before), math.dist(before, after)
    if not math.isfinite(was):
        return 0.0
    error = distance / was if was > 0 else distance
    return math.inf if math.isnan(error) else error
