"""What makes the second run of a call equal to its first."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from recoup.residuals.ambient import Ambient
from recoup.residuals.guards import Guard
from recoup.residuals.held import Held
from recoup.residuals.seeds import Draws
from recoup.residuals.sources import looked_at

__all__ = ["Rerun"]


class Rerun:
    """The draws, settings, parameters and statistics of a call that may run again.

    Args:
        name: what errors call it.
        modules: whose parameters, buffers and modes must not change in between.
        code: what is run, a module or the code object of a function.
        held: what a function reads beside its arguments, if it is one.
    """

    __slots__ = ("_ambient", "_code", "_draws", "_guard", "_held", "_name")

    def __init__(
        self, name: str, modules: tuple[nn.Module, ...], code: object, held: Held | None
    ) -> None:
        self._name = name
        self._code = code
        self._held = held
        self._guard = Guard(modules)
        self._ambient = Ambient()
        self._draws = Draws()

    @contextmanager
    def first(self) -> Generator[None]:
        """Around the first run."""
        looking = looked_at(self._code, self._guard.is_training, self._name)
        with looking, self._guard.counted(), self._draws.recording():
            yield
        self._guard.first_run_ended(self._name)
        if self._held is not None:
            self._held.first_run_ended()

    @property
    def has_foreign_draws(self) -> bool:
        """Whether the first run drew other than by seeds of ours."""
        return self._draws.has_foreign

    @contextmanager
    def again(self) -> Generator[None]:
        """Around any later run, which then computes what the first one did, and nothing else."""
        self._guard.check(self._name)
        if self._held is not None:
            self._held.check(self._name)
        with self._draws.replaying(), self._ambient.entered(), self._guard.uncounted():
            yield
