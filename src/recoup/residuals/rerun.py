"""What makes the second run of a call equal to its first."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from recoup.errors import ReplayError
from recoup.residuals.ambient import Ambient
from recoup.residuals.guards import Guard
from recoup.residuals.seeds import Draws
from recoup.residuals.sources import looked_at

__all__ = ["Rerun"]


class Rerun:
    """The draws, settings, parameters and statistics of a call that may run again.

    Args:
        name: what errors call it.
        modules: whose parameters, buffers and modes must not change in between.
        code: what is run, a module or the code object of a function.
    """

    __slots__ = ("_ambient", "_code", "_draws", "_guard", "_name")

    def __init__(self, name: str, modules: tuple[nn.Module, ...], code: object) -> None:
        self._name = name
        self._code = code
        self._guard = Guard(modules)
        self._ambient = Ambient()
        self._draws = Draws()

    @contextmanager
    def first(self) -> Generator[None]:
        """Around the first run."""
        looking = looked_at(self._code, self._guard.is_training, self._name)
        with looking, self._draws.recording():
            yield
        self._guard.first_run_ended(self._name)

    def check_invertible(self) -> None:
        """Raise if the first run drew in a way that an inverse cannot undo in reverse order."""
        if self._draws.has_foreign:
            raise ReplayError(
                f"{self._name} draws random numbers, and an inverse would draw them in another "
                "order. Call the network that draws through `self.evaluate(network, x)`, in "
                '`forward` and in `inverse`, or choose memory="sqrt".'
            )

    @contextmanager
    def again(self) -> Generator[None]:
        """Around any later run, which then computes what the first one did, and nothing else."""
        self._guard.check(self._name)
        with self._draws.replaying(), self._ambient.entered(), self._guard.uncounted():
            yield
