"""Replay: makes the second run of a call equal to its first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from recoup._core.ambient import Ambient
from recoup._core.closures import Held
from recoup._core.code_keys import Codes
from recoup._core.deterministic import QUIET
from recoup._core.guards import Guard
from recoup._core.inner_gradients import FirstRun
from recoup._core.random_sources import looked_at
from recoup._core.restoring import Restoring
from recoup._core.rng import Draws

__all__ = ["Rerun"]

_NOTHING = nullcontext()


class Rerun:
    """The draws, settings, parameters and statistics of a call that may run again.

    Args:
        name: the name of the call in error messages.
        modules: the modules whose parameters, buffers and modes must not change in between.
        code: the code that runs: a module, or the `Codes` of a function.
        held: the values that a function reads beside its arguments; None for a module.
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
        """Return a `FirstRun`, which decides whether a run keeps its residuals until it ends."""
        codes: Sequence[Any] = (self._code,)
        if isinstance(self._code, Codes):
            codes = self._code.codes
        return FirstRun((*codes, *self._modules), is_training=self._guard.is_training)

    def first(self) -> _First:
        """Return a context for the first run."""
        return _First(self)

    def again(self, *, stops: bool = False) -> _Again:
        """Return a context for a later run, which then computes what the first one did.

        If it `stops` half way, by an exception, attributes of modules are put back: a flag that a
        forward sets, and clears at its end, would otherwise stay set.
        """
        return _Again(self, stops)

    @property
    def has_foreign_draws(self) -> bool:
        """Whether the first run drew other than by the seeds of recoup."""
        return self._draws.has_foreign


def _not_of_torch(guard: Guard) -> list[nn.Module]:
    return [module for module, _ in guard._modes if type(module) not in QUIET]


# Classes and not generators: a chain enters them once or twice for each of its stages.


# The `with` statement takes their locks, since it takes and frees a lock in one instruction.


class _First(Restoring):
    __slots__ = ("_draws", "_looking", "_rerun", "lock")

    def __init__(self, rerun: Rerun) -> None:
        super().__init__()
        self._rerun = rerun
        guard = rerun._guard
        self._looking = looked_at(rerun._code, rerun._modules, guard.is_training, rerun._name)
        self.lock = guard.counted()
        self._draws = rerun._draws.recording()

    def __enter__(self) -> None:
        if self._looking is not None:
            self._looking.__enter__()
        self._draws.__enter__()

    def restore(self) -> None:
        self._draws.restore()
        if self._looking is not None:
            self._looking.restore()

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        rerun = self._rerun
        self._draws.leave(kind, value, traceback)
        if self._looking is not None:
            self._looking.leave(kind, value, traceback)
        if kind is None:
            rerun._guard.first_run_ended(rerun._name)
            if rerun._held is not None:
                rerun._held.first_run_ended()


class _Again(Restoring):
    __slots__ = (
        "_ambient",
        "_as_it_was",
        "_attributes",
        "_draws",
        "_modules",
        "lock",
    )

    def __init__(self, rerun: Rerun, stops: bool) -> None:
        super().__init__()
        rerun._guard.check(rerun._name)
        if rerun._held is not None:
            rerun._held.check(rerun._name)
        self._draws = rerun._draws.replaying()
        self._ambient = rerun._ambient.entered()
        guarded = rerun._guard.as_it_was()
        held = None if rerun._held is None else rerun._held.as_it_was()
        self._as_it_was = [each for each in (guarded, held) if each is not None]
        self.lock: AbstractContextManager[object] = (
            self._as_it_was[0].lock if self._as_it_was else _NOTHING
        )
        self._modules: Sequence[nn.Module] = _not_of_torch(rerun._guard) if stops else ()
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> None:
        if self._ambient is not None:
            self._ambient.__enter__()
        for each in self._as_it_was:
            each.__enter__()
        self._draws.__enter__()
        for module in self._modules:
            own = module.__dict__
            self._attributes.append((own, own.copy()))

    def restore(self) -> None:
        for own, before in self._attributes:
            for key in own.keys() - before.keys():
                del own[key]
            own.update(before)
        self._attributes = []
        self._draws.restore()
        for each in reversed(self._as_it_was):
            each.restore()
        if self._ambient is not None:
            self._ambient.restore()

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            self._attributes.clear()
        self.restore()
