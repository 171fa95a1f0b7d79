"""The drift guard: how far from forward's values an inverse arrives, and what then.

NOTE [ Drift ]

Rule 1. Inverses round, and each magnifies the error that it is given. A gradient is made of all the
        states that inverses delivered, so what counts is the sum of their relative errors: in
        stiff chains gradients were off by one to five times that sum, in ordinary ones by a tenth
        of it. A fifth of the tolerance is allowed.
Rule 2. The sum may grow with the stages that are done, so that those to come have their part; a
        tenth of it may be used at once.
Rule 3. A stage whose input comes out too far is run again from its true input, had by running the
        stages before it from the nearest kept state. From the errors on the way the guard learns
        where the next forward is to keep a state, so that this soon ends: it marks the stage as
        one to be recomputed, whose input a schedule keeps.
Rule 4. What is computed again is right, so an inverse that is plainly wrong shows in bytes and in
        time alone. The errors that states were refused for are kept until `reset`, and it is said
        once if most states have to be kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal, get_args

from recoup.errors import DriftError
from recoup.schedules import Way

__all__ = ["Drift", "DriftGuard"]

Otherwise = Literal["recompute", "raise", "warn", "ignore"]

_PER_ERROR = 5
_CALM = 10  # times within the tolerance
_ROUNDINGS = 8
_AT_ONCE = 0.1
# A state is kept where the errors are still this much smaller than they may be: weights move from
# one step to the next, and the errors with them.
_MARGIN = 2.0


class DriftGuard:
    """What to do in backward where an inverse does not find its way back, and what was seen.

    Kept for backward: eight numbers a stage and tensor of its state, and, where the guard
    recomputes, the first state of the chain and those it has learned to keep. Backward pays for
    looking at some of each state, and where errors were too large, a recomputation. A guard is for
    one chain, whose errors it remembers.

    Args:
        otherwise: what happens past the tolerance. "recompute": the stage is run from its true
            input, which is computed again from the nearest kept state; from the next forward on,
            states are kept where the errors seen say so. "raise" a `DriftError`. "warn", once.
            "ignore": nothing is measured.
        tolerance: by how much gradients may be off, relative to themselves. The relative errors of
            the states that inverses deliver may add up to a fifth of it.

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
        self._worst = (0.0, "")  # of the refused: the error, and the stage whose input it is
        self._num_inverses = 0  # of the chain, had nothing to be kept
        self._num_recomputed = 0  # states, in the last backward
        self._has_warned = False
        self._has_said_most = False

    @classmethod
    def of(cls, drift: Drift) -> DriftGuard:
        """Return the guard that `drift` means: itself, or one that does what it says."""
        return drift if isinstance(drift, DriftGuard) else cls(drift)

    def anew(self) -> DriftGuard:
        """Return a guard of the same kind for another chain."""
        return DriftGuard(self.otherwise, self.tolerance)

    @property
    def largest_error(self) -> float:
        """The largest relative error that an inverse arrived with.

        Of the states that the last backward used, and of those that were refused since `reset` and
        computed again.
        """
        return max((*self.errors.values(), *self.refused.values()), default=0.0)

    @property
    def total_error(self) -> float:
        """The sum of the errors of the states that the last backward used.

        It may be a fifth of the tolerance; a state that was refused has no part in it.
        """
        return sum(self.errors.values())

    def reset(self) -> None:
        """Forget the errors and where states are kept, after weights have changed much."""
        self.errors = {}
        self.refused = {}
        self.kept = frozenset()
        self._worst = (0.0, "")
        self._num_recomputed = 0
        self._has_said_most = False

    def ways(self, ways: Sequence[Way]) -> tuple[Way, ...]:
        """Return the ways of the stages of a chain, with those recomputed whose input is kept."""
        self._num_inverses = sum(way == "invert" for way in ways)
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

    def _allowance(
        self, num_done: int, num_stages: int, least: float, *, at_once: bool = True
    ) -> float:
        """Return the largest sum of errors after `num_done` of `num_stages` (See Rule 2).

        Args:
            num_done: how many stages were inverted.
            num_stages: how many there are.
            least: the rounding of the type of the states.
            at_once: whether a tenth of all may be used at once.
        """
        share = num_done / max(num_stages, 1)
        share = max(share, _AT_ONCE) if at_once else share
        return max(share * self.tolerance / _PER_ERROR, num_done * _ROUNDINGS * least)

    def _objects(self, total: float, name: str) -> bool:
        """Whether a state is to be recomputed with which the errors sum to `total`; or raise."""
        if self.otherwise == "recompute":
            return True
        text = (
            f"Inverses drifted: with the input of {name} the relative errors of what they "
            f"delivered add up to {total:.1e}, so that gradients may be off by more than the "
            f'`tolerance` of {self.tolerance:g}. Use drift="recompute", or bound the scale of the '
            "layers."
        )
        if self.otherwise == "raise":
            raise DriftError(text)
        self._warn(text)
        return False

    def _is_calm(self, num_stages: int) -> bool:
        """Whether the last backward through all these stages was far within the tolerance."""
        # A state that was computed again has no error, but its stage is as stiff as it was.
        if len(self.errors) < num_stages or self._num_recomputed:
            return False
        return self.total_error * _CALM <= self.tolerance / _PER_ERROR

    def _refuse(self, index: int, error: float, name: str) -> None:
        """Write down how far off a state was that is computed again (See Rule 4)."""
        self.refused[index] = max(error, self.refused.get(index, 0.0))
        if error > self._worst[0]:
            self._worst = (error, name)

    def _say_if_most_are_kept(self, num_stages: int) -> None:
        """Warn once if inverses save little of this chain (See Rule 4).

        Args:
            num_stages: how many stages were to be inverted this time.
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

    def _say_late(self, name: str) -> None:
        """Warn that drift was found after some gradients were made, which nobody had looked at."""
        warnings.warn(  # each time: these gradients are used
            f"Inverses began to drift suddenly, and it was found at {name}, up to three stages "
            "late: the gradients of this step may be off by more than the `tolerance` of "
            f"{self.tolerance:g}. From the next step on every stage is looked at.",
            stacklevel=2,
        )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, stacklevel=2)

    def _learn(self, errors: dict[int, float], index: int, top: int, rate: float) -> None:
        """Take down where a state is to be kept, after that at `index` came out too far.

        Args:
            errors: of the states that inverses delivered, from `top` down.
            index: the state that was too far.
            top: the lowest state above it that was exact.
            rate: the error that each stage may have, if all have the same.
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


Drift = Otherwise | DriftGuard
