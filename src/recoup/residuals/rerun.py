"""What makes the second run of a call equal to its first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from recoup.residuals.ambient import Ambient
from recoup.residuals.codes import Codes
from recoup.residuals.guards import Guard
from recoup.residuals.held import Held
from recoup.residuals.inner import FirstRun
from recoup.residuals.quiet import QUIET
from recoup.residuals.seeds import Draws
from recoup.residuals.sources import looked_at

__all__ = ["Rerun"]

_NOTHING = nullcontext()


class Rerun:
    """The draws, settings, parameters and statistics of a call that may run again.

    Args:
        name: what errors call it.
        modules: whose parameters, buffers and modes must not change in between.
        code: what is run, a module or the `Codes` of a function.
        held: what a function reads beside its arguments, if it is one.
    """

    __slots__ = ("_ambient", "_code", "_draws", "_guard", "_held", "_modules", "_name")

    def __init__(
        self, name: str, modules: tuple[nn.Module, ...], code: object, held: Held | None
    ) -> None:
        self._name = name
        self._code = code
        self._modules = modules
        self._held = held
        self._guard = Guard(modules)
        self._ambient = Ambient()
        self._draws = Draws()

    def first_run(self) -> FirstRun:
        """Return what says whether the first run keeps its residuals until it ends."""
        codes: Sequence[Any] = (self._code,)
        if isinstance(self._code, Codes):
            codes = self._code.codes
        return FirstRun((*codes, *self._modules), is_training=self._guard.is_training)

    def first(self) -> _First:
        """Around the first run."""
        return _First(self)

    def again(self, *, stops: bool = False) -> _Again:
        """Around any later run, which then computes what the first one did, and nothing else.

        If it `stops` half way, by an exception, attributes of modules are put back: a flag that a
        forward sets, and takes back at its end, would stay.
        """
        return _Again(self, stops)

    @property
    def has_foreign_draws(self) -> bool:
        """Whether the first run drew other than by seeds of ours."""
        return self._draws.has_foreign


def _not_of_torch(guard: Guard) -> list[nn.Module]:
    return [module for module, _ in guard._modes if type(module) not in QUIET]


# Classes and not generators: a chain enters them once or twice for each of its stages.


class _First:
    __slots__ = ("_counted", "_draws", "_looking", "_rerun")

    def __init__(self, rerun: Rerun) -> None:
        self._rerun = rerun
        guard = rerun._guard
        self._looking = looked_at(rerun._code, rerun._modules, guard.is_training, rerun._name)
        self._counted = guard.counted()
        self._draws = rerun._draws.recording()

    def __enter__(self) -> None:
        self._looking.__enter__()
        self._counted.__enter__()
        self._draws.__enter__()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        rerun = self._rerun
        try:
            self._draws.__exit__()
        finally:
            self._counted.__exit__(kind, value, traceback)
            self._looking.__exit__(kind, value, traceback)
        if kind is None:
            rerun._guard.first_run_ended(rerun._name)
            if rerun._held is not None:
                rerun._held.first_run_ended()


class _Again:
    __slots__ = ("_ambient", "_as_it_was", "_attributes", "_draws", "_modules", "_values")

    def __init__(self, rerun: Rerun, stops: bool) -> None:
        rerun._guard.check(rerun._name)
        if rerun._held is not None:
            rerun._held.check(rerun._name)
        self._draws = rerun._draws.replaying()
        self._ambient = rerun._ambient.entered()
        self._as_it_was = rerun._guard.as_it_was()
        self._values: AbstractContextManager[None] = _NOTHING
        if rerun._held is not None:
            self._values = rerun._held.as_it_was()
        self._modules: Sequence[nn.Module] = _not_of_torch(rerun._guard) if stops else ()
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> None:
        self._ambient.__enter__()
        self._as_it_was.__enter__()
        self._values.__enter__()
        self._draws.__enter__()
        for module in self._modules:
            own = module.__dict__
            self._attributes.append((own, own.copy()))

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is not None:
            for own, before in self._attributes:
                for key in own.keys() - before.keys():
                    del own[key]
                own.update(before)
        try:
            self._draws.__exit__()
        finally:
            self._values.__exit__(kind, value, traceback)
            self._as_it_was.__exit__(kind, value, traceback)
            self._ambient.__exit__(kind, value, traceback)
