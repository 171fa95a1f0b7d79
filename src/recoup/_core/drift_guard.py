"""The drift guard: how far inverses may be from the values of forward, and what follows.

NOTE [ Drift ]

Rule 1. Inverses round, and each magnifies the error of its input. A gradient depends on all the
        states that inverses returned, so the guard bounds the sum of their relative errors by a
        fifth of the tolerance. In ordinary chains gradients were off by a tenth of that sum, and in
        stiff ones by once or twice it; one in twenty of these by more than five times, in chains
        whose gradients a rounding error of the input changes by percents. A tighter bound would
        recompute states of ordinary chains of 64 couplings.
Rule 2. The sum may grow in proportion to the stages done, which leaves the stages to come their
        share; a tenth of the allowance may be used at once.
Rule 3. A stage whose input is too far off is run again from its true input, which comes from
        running the stages before it from the nearest kept state. From the errors seen on the way
        the guard learns where the next forward must keep a state, so that few such runs are
        needed: it marks the stage as one to recompute, and a schedule keeps the input of those.
Rule 4. Recomputed states are right, so a plainly wrong inverse costs only bytes and time. The
        errors of refused states are kept until `reset`, and a warning is given once if most states
        have to be kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, get_args

from recoup.errors import DriftError
from recoup.schedules import Way

Otherwise = Literal["recompute", "raise", "warn", "ignore"]

_PER_ERROR = 5
_ROUNDINGS = 8
_AT_ONCE = 0.1
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
            the states that inverses return may add up to a fifth of it.

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
        if not 0 < tolerance < 1:
            raise ValueError(f"`tolerance` is {tolerance}, but must lie between 0 and 1.")
        self.otherwise: Otherwise = otherwise
        self.tolerance = tolerance
        self.errors: dict[int, float] = {}
        self.refused: dict[int, float] = {}
        self.kept: frozenset[int] = frozenset()
        self._worst = (0.0, "")  # of the refused states: the error, and the stage whose input it is
        self._num_inverses = 0  # of the chain, if no state were kept
        self._num_recomputed = 0  # states, in the last backward
        self._has_warned = False
        self._has_said_most = False

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
        `reset` and computed again.
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
        self._num_recomputed = 0
        self._has_said_most = False

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

    def _allowance(
        self, num_done: int, num_stages: int, least: float, *, at_once: bool = True
    ) -> float:
        """Return the largest sum of errors after `num_done` of `num_stages` (See Rule 2).

        Args:
            num_done: how many stages were inverted.
            num_stages: how many stages there are.
            least: the machine epsilon of the states.
            at_once: whether a tenth of the whole may be used at once.
        """
        share = num_done / max(num_stages, 1)
        share = max(share, _AT_ONCE) if at_once else share
        return max(share * self.tolerance / _PER_ERROR, num_done * _ROUNDINGS * least)

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
        return _strict()

    def _objects(self, total: float, name: str) -> bool:
        """Whether to recompute a state that brings the sum to `total`; may raise or warn."""
        if self.otherwise == "recompute" and not _Strict.is_on:
            return True
        text = (
            f"Inverses drifted: with the input of {name} the relative errors of what they "
            f"delivered add up to {total:.1e}, so that gradients may be off by more than the "
            f'`tolerance` of {self.tolerance:g}. Use drift="recompute", or bound the scale of the '
            "layers."
        )
        if self.otherwise != "warn":
            raise DriftError(text)
        self._warn(text)
        return False

    def _refuse(self, index: int, error: float, name: str) -> None:
        """Record the error of a state that is computed again (See Rule 4)."""
        self.refused[index] = max(error, self.refused.get(index, 0.0))
        if error > self._worst[0]:
            self._worst = (error, name)

    def _say_if_most_are_kept(self, num_stages: int) -> None:
        """Warn once if inverses save little of this chain (See Rule 4).

        Args:
            num_stages: how many stages this backward inverts.
        """
        num_inverses = max(self._num_inverses, num_stages)
        if self._has_said_most or 2 * len(self.kept) <= num_inverses:
            return
        self._has_said_most = True
        error, name = self._worst
        warnings.warn(
            f"Most states of this chain must be kept, {len(self.kept)} or more of {num_inverses}: "
            "what inverses deliver is too far from what forward was given, most of all the input "
            f"of {name}, by {error:.1e} of itself. If its `inverse` does not undo `forward`, mend "
            "it (recoup.invertible.check_invertible tells). If the layers are stiff, bound their "
            'scales, or use memory="sqrt". The gradients are right, at the price of bytes and '
            "seconds.",
            stacklevel=2,
        )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, stacklevel=2)

    def _learn(self, errors: dict[int, float], index: int, top: int, rate: float) -> None:
        """Choose a state to keep from now on, after the one at `index` was too far off.

        Args:
            errors: the errors of the states that inverses returned, from `top` down.
            index: the state that was too far off.
            top: the lowest state above it that was exact.
            rate: the error allowed for each stage, if all have the same.
        """
        place, total = min(index + 1, top - 1), 0.0
        for at in range(top - 1, index, -1):
            total += errors.get(at, 0.0)
            if total * _MARGIN <= rate * (top - at):
                place = at
        self.kept |= {place}

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


@contextmanager
def _strict() -> Generator[None]:
    before, _Strict.is_on = _Strict.is_on, True
    try:
        yield
    finally:
        _Strict.is_on = before


Drift = Otherwise | DriftGuard
