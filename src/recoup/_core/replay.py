"""Replay: makes the second run of a call equal to its first."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from recoup._core.called_code import CalledCode
from recoup._core.closures import ClosureGuard
from recoup._core.dispatch_modes import InMode, PassingMode, num_dispatch_modes
from recoup._core.guards import ModuleGuard
from recoup._core.inner_gradients import FirstRun
from recoup._core.kept_decisions import DECIDES_NOTHING, Decisions
from recoup._core.random_sources import sources_checked
from recoup._core.replaced_values import LOCK, Replaced
from recoup._core.restoring import Restoring, new_lock
from recoup._core.rng import Draws, Recording, Replaying
from recoup._core.side_effects import CHANGES_NOTHING, SideEffects
from recoup.errors import ReplayError

__all__ = ["Replay", "autocast_nesting", "settings_as_now"]

_NO_MODULES = ModuleGuard(())


class Replay:
    """The draws, settings, parameters and statistics of a call that may run again.

    Args:
        name: the name of the call in error messages.
        modules: the modules whose parameters, buffers and modes must not change in between.
        code: the code that runs: a module, or the `CalledCode` of a function.
        closure_guard: the values that a function reads beside its arguments; None for a module.
        part_names: the name of each module in error messages, if they are those of several calls.
        is_inverted: whether later runs may be inverses, which decide nothing again.
    """

    __slots__ = (
        "_closure",
        "_draws",
        "_effects",
        "_generators",
        "_guard",
        "_has_mode",
        "_name",
        "_parts",
        "_settings",
        "decisions",
    )

    decisions: Decisions | None  # of the first run; None if it need not be looked at for any

    def __init__(
        self,
        name: str,
        modules: tuple[nn.Module, ...],
        code: object,
        closure_guard: ClosureGuard | None,
        part_names: Sequence[str] = (),
        *,
        is_inverted: bool = False,
    ) -> None:
        self._name = name
        # The caller holds them for as long as this is in use.
        self._parts = list(map(weakref.ref, modules))
        self._generators: Sequence[Any] = ()
        if isinstance(code, CalledCode):
            self._parts += map(weakref.ref, code.codes)
            self._generators = code.generators
        elif code not in modules:
            self._parts.append(weakref.ref(code))
        self._closure = closure_guard if closure_guard is not None and closure_guard.reads else None
        self._guard = ModuleGuard(modules, name, part_names) if modules else _NO_MODULES
        self._settings = _settings()
        self._has_mode = False  # whether the first run was in a dispatch mode
        self._draws = Draws()
        self.decisions: Decisions | None = None
        self._effects: SideEffects | None = None
        mode = self._guard.is_training
        if not is_inverted:
            has_objects = not CHANGES_NOTHING[mode].issuperset(self._parts)
            if not DECIDES_NOTHING[mode].issuperset(self._parts):
                self.decisions = Decisions(name)
            if has_objects or (self.decisions is not None and self._guard.buffers):
                fn = None if closure_guard is None else closure_guard.fn
                self._effects = SideEffects(name, self._guard, fn, has_objects=has_objects)

    def _looked_at(self) -> None:
        """Note what the first run showed about its code, for later first runs."""
        decisions, effects, mode = self.decisions, self._effects, self._guard.is_training
        has_counted = effects is not None and effects.first_run_ended()
        if effects is not None and not effects.changed_objects:
            _add(CHANGES_NOTHING[mode], self._parts)
        if decisions is not None and not decisions.are_any and not has_counted:
            _add(DECIDES_NOTHING[mode], self._parts)

    def first_run(self) -> FirstRun:
        """Return a `FirstRun`, which decides whether a run keeps its residuals until it ends."""
        return FirstRun(self._parts, is_training=self._guard.is_training)

    def first(self, num_saves: Callable[[], int] | None = None) -> _First:
        """Return a context for the first run.

        Args:
            num_saves: returns how many residuals the run has saved so far; None if it saves none.
        """
        return _First(self, num_saves)

    def again(self, num_saves: Callable[[], int] | None = None, *, stops: bool = False) -> _Again:
        """Return a context for a later run, which then computes what the first one did.

        Args:
            num_saves: returns how many residuals the run has made so far; None if it makes none.
            stops: whether the run may stop half way, by an exception. Then attributes of modules
                are put back: a flag that a forward sets, and clears at its end, would otherwise
                stay set.
        """
        return _Again(self, num_saves, stops)

    @property
    def has_foreign_draws(self) -> bool:
        """Whether the first run drew other than by the seeds of recoup."""
        return self._draws.has_foreign


def _add(known: set[weakref.ref[Any]], parts: Sequence[weakref.ref[Any]]) -> None:
    for part in parts:
        value = part()
        if value is not None and part not in known:
            known.add(weakref.ref(value, known.discard))


# Classes and not generators: a chain enters them once or twice for each of its stages. The `with`
# statement takes their locks, since it takes and frees a lock in one instruction.


class _First(Recording):
    """A context for the first run of a call, whose `lock` the caller holds around it."""

    __slots__ = ("_keeping", "_replay", "_source_check", "lock")

    def __init__(self, replay: Replay, num_saves: Callable[[], int] | None) -> None:
        super().__init__(replay._draws)
        self._replay = replay
        guard = replay._guard
        self._source_check = sources_checked(
            replay._parts,
            replay._name,
            is_training=guard.is_training,
            generators=replay._generators,
        )
        decisions = replay.decisions
        self._keeping: InMode | None = None
        if decisions is not None:
            self._keeping = decisions.recording(
                replay._effects, num_saves, is_first_look=self._source_check is not None
            )
        self.lock = LOCK if guard.has_norms else new_lock()

    def __enter__(self) -> None:
        if self._source_check is not None:
            self._source_check.__enter__()
        self._replay._has_mode = num_dispatch_modes() > 0
        super().__enter__()
        if self._keeping is not None:
            self._keeping.__enter__()

    def restore(self) -> None:
        if self._keeping is not None:
            self._keeping.restore()
        super().restore()
        if self._source_check is not None:
            self._source_check.restore()

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        replay = self._replay
        if self._keeping is not None:
            self._keeping.leave(kind, value, traceback)
        super().leave(kind, value, traceback)
        if self._source_check is not None:
            self._source_check.leave(kind, value, traceback)
        if kind is None:
            if replay.decisions is not None or replay._effects is not None:
                replay._looked_at()
            try:
                replay._guard.first_run_ended()
            except ReplayError:  # it changed a buffer, which it did not when it was looked at
                for mode in (*DECIDES_NOTHING, *CHANGES_NOTHING):
                    mode.difference_update(replay._parts)
                raise
            if replay._closure is not None:
                replay._closure.first_run_ended(replay._name)


class _Again(Replaying):
    """A context for a later run of a call, whose `lock` the caller holds around it."""

    __slots__ = ("_attributes", "_mode", "_modules", "_replaced", "_settings", "lock")

    def __init__(self, replay: Replay, num_saves: Callable[[], int] | None, stops: bool) -> None:
        super().__init__(replay._draws)
        guard, closure = replay._guard, replay._closure
        guard.check()
        values = guard.to_replace()
        if closure is not None:
            closure.check(replay._name)
            values += closure.to_replace()
        if replay._effects is not None:
            values += replay._effects.to_replace()
        self._replaced = Replaced(values) if values else None
        self.lock = LOCK if values else new_lock()
        self._settings: _Settings | None = None
        before = replay._settings
        if before != _settings() or before[0] or before[2]:  # casts
            self._settings = _Settings(replay._settings)
        # Within a mode torch takes composite operators apart in another way (a bias is not added in
        # place), so versions and the number of nodes would differ from those of the first run.
        self._mode: InMode | None = None
        if replay.decisions is not None:
            self._mode = replay.decisions.repeating(num_saves)
        elif replay._has_mode and not num_dispatch_modes():
            self._mode = InMode(PassingMode())
        self._modules = guard.modules_with_attributes() if stops else ()
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> None:
        if self._settings is not None:
            self._settings.__enter__()
        if self._replaced is not None:
            self._replaced.__enter__()
        super().__enter__()
        if self._mode is not None:
            self._mode.__enter__()
        for module in self._modules:
            own = module.__dict__
            self._attributes.append((own, own.copy()))

    def restore(self) -> None:
        if self._mode is not None:
            self._mode.restore()
            self._mode = None  # it may hold what holds this object: a reference cycle
        for own, before in self._attributes:
            for key in own.keys() - before.keys():
                del own[key]
            own.update(before)
        self._attributes = []
        super().restore()
        if self._replaced is not None:
            self._replaced.restore()
        if self._settings is not None:
            self._settings.restore()

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            self._attributes.clear()
        self.restore()


# --- the settings of autocast, and of the kernels of scaled dot product attention ----------------

_autocast, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_sdpa = torch.backends.cuda
# What torch.backends.cuda asks, a call of Python less for each setting of each region.
_flash, _mem_efficient = torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled
_math, _cudnn = torch._C._get_math_sdp_enabled, torch._C._get_cudnn_sdp_enabled
_Values = tuple[bool, torch.dtype, bool, torch.dtype, bool, bool, bool, bool]


def _settings() -> _Values:
    """Return the settings that affect the results of operators."""
    return (
        *(_autocast("cpu"), _autocast_dtype("cpu"), _autocast("cuda"), _autocast_dtype("cuda")),
        *(_flash(), _mem_efficient(), _math(), _cudnn()),
    )


def _casts(values: _Values) -> bool:
    return values[0] or values[2]


def _set(values: _Values) -> None:
    for kind, is_enabled, dtype in (("cpu", *values[:2]), ("cuda", *values[2:4])):
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    if values[4:] != _settings()[4:]:
        _sdpa.enable_flash_sdp(values[4])
        _sdpa.enable_mem_efficient_sdp(values[5])
        _sdpa.enable_math_sdp(values[6])
        _sdpa.enable_cudnn_sdp(values[7])


class _Settings(Restoring):
    """A context with other settings.

    Autocast is entered without its cache of weight copies: a cached copy would tie the second run
    to the graph of the code around it. The copies hold the same numbers either way.
    """

    __slots__ = ("_before", "_values")

    def __init__(self, values: _Values) -> None:
        self._values = values
        self._before: tuple[_Values, bool, int] | None = None

    def __enter__(self) -> None:
        before = _settings()
        self._before = (before, torch.is_autocast_cache_enabled(), autocast_nesting())
        if _casts(self._values) or _casts(before):
            torch.autocast_increment_nesting()
            torch.set_autocast_cache_enabled(False)
        _set(self._values)

    def restore(self) -> None:
        if self._before is None:
            return
        values, has_cache, nesting = self._before
        _set(values)
        torch.set_autocast_cache_enabled(has_cache)
        for _ in range(autocast_nesting() - nesting):
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        self._before = None


def settings_as_now() -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes contexts with the settings that are in force now."""
    values = _settings()
    return lambda: nullcontext() if values == _settings() else _Settings(values)


def autocast_nesting() -> int:
    """Return the depth of nested autocast contexts; at depth 0 torch clears its cache."""
    # Torch has no way to ask. In one call of C, between whose parts nothing interrupts.
    both = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)
    return list(map(operator.call, both))[1]
