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
    """Base class of the errors of recoup."""


class ChangedError(RecoupError):
    """A value that backward needs was changed in place after forward used it."""


class ReplayError(RecoupError):
    """The recomputation of a region did not make the residuals of the first run."""


class NotInvertibleError(RecoupError, ValueError):
    """A stage that cannot be inverted was to be inverted."""


class DriftError(RecoupError):
    """The result of an inverse in backward is too far from the input of forward."""


class GridError(RecoupError, ValueError):
    """A value left the range within which arithmetic on a grid is exact."""


class ConvergenceError(RecoupError, ArithmeticError):
    """An iterative inverse did not converge to its tolerance."""


class ScheduleError(RecoupError, ValueError):
    """A schedule contains an action that is impossible at its position."""


class GradientError(RecoupError):
    """Gradients could not be collected, merged or applied."""


class BudgetError(RecoupError, ValueError):
    """No plan keeps to the byte budget.

    Args:
        message: the budget, and the smallest one that is possible.
        least_bytes: the smallest budget that a plan keeps to.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int]]:
        return type(self), (str(self), self.least_bytes)
