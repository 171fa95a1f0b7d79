"""The errors of recoup. Each message names the culprit, what was needed, and the way out."""

from __future__ import annotations

from typing import Any

__all__ = [
    "BudgetError",
    "ChangedError",
    "ConvergenceError",
    "DriftError",
    "GradientError",
    "GridError",
    "NotInvertibleError",
    "OffloadError",
    "RecoupError",
    "ReplayError",
    "ScheduleError",
]


class RecoupError(RuntimeError):
    """Base class of the errors of recoup."""


class ChangedError(RecoupError):
    """A tensor, a submodule or a hook was changed between forward and backward."""


class ReplayError(RecoupError):
    """A region cannot be run again, or its second run differs from its first."""


class NotInvertibleError(RecoupError, ValueError):
    """A schedule or a memory mode inverts a stage that has no inverse."""


class DriftError(RecoupError):
    """An inverse in backward computed a state that is too far from the one of forward."""


class GridError(RecoupError, ValueError):
    """A value is outside the range in which arithmetic on a grid is exact."""


class ConvergenceError(RecoupError, ArithmeticError):
    """An iterative inverse did not converge to its tolerance."""


class OffloadError(RecoupError):
    """Tensors could not be written to the folder in which they should wait for backward."""


class ScheduleError(RecoupError, ValueError):
    """A schedule is incomplete, has an impossible action, or does not exist within a budget."""


class GradientError(RecoupError):
    """Gradients could not be collected, merged or applied."""


class BudgetError(RecoupError, ValueError):
    """No plan fits in the byte budget.

    Args:
        message: the budget, and the smallest one that is possible.
        least_bytes: the smallest budget that a plan fits in.

    Attributes:
        frontier: the plans that are possible, a `Frontier` (See `recoup.plan`); None in an error
            that comes from another process.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
        self.frontier: Any = None

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int]]:
        return type(self), (str(self), self.least_bytes)
