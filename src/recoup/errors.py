"""The errors of recoup: each names the culprit, what was needed, and the way out."""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "ChangedError",
    "ConvergenceError",
    "DriftError",
    "GradientError",
    "GridError",
    "NotInvertibleError",
    "RecoupError",
    "ReplayError",
    "ScheduleError",
]


class RecoupError(RuntimeError):
    """Base of the errors that recoup raises on its own account."""


class ChangedError(RecoupError):
    """A value that backward needs was changed in place after forward used it."""


class ReplayError(RecoupError):
    """A second run of a region did not make the residuals that the first one made."""


class NotInvertibleError(RecoupError, ValueError):
    """A stage was asked to be inverted and cannot be."""


class DriftError(RecoupError):
    """What an inverse delivers in backward is too far from what forward was given."""


class GridError(RecoupError, ValueError):
    """A value left the range within which arithmetic on a grid is exact."""


class ConvergenceError(RecoupError, ArithmeticError):
    """An inverse by repetition did not come as near as it was asked to."""


class ScheduleError(RecoupError, ValueError):
    """A schedule asks for an action that is impossible where it stands."""


class GradientError(RecoupError):
    """Gradients could not be collected, merged or applied as they should be."""


class BudgetError(RecoupError, ValueError):
    """No plan keeps to a number of bytes.

    Args:
        message: what was asked for, and what is possible.
        least_bytes: the least number of bytes that a plan keeps to.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int]]:
        return type(self), (str(self), self.least_bytes)
