"""Contexts that change something for a while and put it back, even if they are cut off.

NOTE [ An interrupt at any instruction ]

Rule 1. Python may raise KeyboardInterrupt as `__enter__` returns, before the first line of
        `__exit__` or half way through it, and does not call `__exit__` again. So the end of a
        context does not depend on that call. A `with` statement fetches `__exit__` before it calls
        `__enter__`, and holds the fetched object until it is left, in whichever way. Here nothing
        else holds that object; if it is freed before the context has ended, the context is
        restored. Tracebacks hold the variables of frames, not this object, so that happens at once.
Rule 2. `restore` may be called at any moment, also before `__enter__` or half way through another
        call of it, and any number of times. So `__enter__` records the old settings before it
        changes anything, and `restore` clears that record only after it has put them back, and
        does nothing if there is no record.
Rule 3. A context that is entered by hand (`inner.__enter__()`) is restored by hand: `restore` of
        the outer one calls `restore` of the inner one.
Rule 4. Code after `finally` can be cut off, too, and is then not run again. So `Undoing` is given
        each call that undoes a change, before the change is made.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, _GeneratorContextManager
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar, cast

from recoup._core.compile import never_compiled

__all__ = ["Restoring", "Reusable", "Undoing", "new_lock", "restoring"]

# What `threading.RLock` calls: a lock for each region is made in a fifth of the time.
new_lock: Callable[[], threading.RLock] = type(threading.RLock())
P = ParamSpec("P")
T = TypeVar("T")


class _Exit:
    """The `__exit__` of a context, as an object that the `with` statement alone holds (Rule 1)."""

    @never_compiled
    def __get__(self, context: Any, owner: object = None) -> Any:
        if context is None:
            return _leave  # for an ExitStack, which binds it itself
        leave = partial(_leave, context)
        if getattr(context, "_statement", None) is None:
            context._statement = weakref.ref(leave, context._cut_off)
        return leave


@never_compiled
def _leave(context: Any, kind: Any = None, value: Any = None, traceback: Any = None) -> Any:
    suppresses = context.leave(kind, value, traceback)
    context._statement = None
    return suppresses


class Restoring:
    """A context that undoes its changes, even if it is cut off; it does not nest in itself.

    Subclasses change something in `__enter__`, and put it back in `restore` (See Rule 2).
    """

    __slots__ = ("_statement",)

    _statement: weakref.ref[Any] | None  # set as a `with` statement fetches `__exit__`

    def __enter__(self) -> Any:
        """Record the old settings and change them."""
        return self

    def restore(self) -> None:
        """Put the old settings back."""

    def leave(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        """Do the work of `__exit__`; by default, call `restore`."""
        del kind, value, traceback
        self.restore()

    @never_compiled
    def _cut_off(self, statement: object) -> None:
        del statement
        self._statement = None
        self.restore()

    __exit__: Any = _Exit()


class _ExitOnce:
    @never_compiled
    def __get__(self, context: Any, owner: object = None) -> Any:
        if context is None:
            return _leave_by_hand
        once = context.once()
        context._waiting[threading.get_ident()] = once
        leave = partial(_leave_once, context, once)
        once._statement = weakref.ref(leave, once._cut_off)
        return leave


@never_compiled
def _leave_once(context: Any, once: Any, *error: Any) -> Any:
    if context._waiting.get(threading.get_ident()) is once:
        del context._waiting[threading.get_ident()]
        return _leave_by_hand(context, *error)
    return _leave(once, *error)


@never_compiled
def _leave_by_hand(context: Any, *error: Any) -> Any:
    return _leave(context._by_hand.pop(), *error)


class Reusable:
    """A context that may be entered any number of times, also within itself.

    Each `with` statement has a context of its own, which `once` makes.
    """

    __slots__ = ("_by_hand", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[int, Restoring] = {}  # by thread, from `with` until `__enter__`
        self._by_hand: list[Restoring] = []

    def once(self) -> Restoring:
        """Return the context of one `with` statement."""
        raise NotImplementedError

    @never_compiled
    def __enter__(self) -> Any:
        """Enter the context of one more `with` statement."""
        once = self._waiting.pop(threading.get_ident(), None)
        if once is None or getattr(once, "_statement", None) is None:
            once = self.once()
            self._by_hand.append(once)
        return once.__enter__()

    __exit__: Any = _ExitOnce()


class Undoing(Restoring):
    """A context with calls that undo changes; they run in reverse order when it is left.

    Example:
        >>> from recoup._core.restoring import Undoing
        >>> settings = {"level": 1}
        >>> with Undoing() as undo:
        ...     undo.later(settings.__setitem__, "level", settings["level"])
        ...     settings["level"] = 2
        >>> settings
        {'level': 1}
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def __enter__(self) -> Self:
        return self

    @never_compiled
    def later(self, undo: Callable[..., object], *args: Any) -> None:
        """Register `undo(*args)` before the change it undoes; it may be called twice."""
        self._calls.append((undo, args))

    @never_compiled
    def restore(self) -> None:
        calls = self._calls
        while calls:
            undo, args = calls[-1]
            undo(*args)
            calls.pop()


class _Generated(_GeneratorContextManager[Any]):
    """A context made of a generator, which is closed if the context is cut off."""

    _statement: weakref.ref[Any] | None = None

    def leave(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        return _GeneratorContextManager.__exit__(self, kind, value, traceback)

    def _cut_off(self, statement: object) -> None:
        del statement
        self._statement = None
        self.gen.close()

    __exit__: Any = _Exit()


def restoring(fn: Callable[P, Generator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Do what `contextlib.contextmanager` does; the generator is closed if the context is cut off.

    Use a `with` statement around `yield` to undo changes, not `finally` (See Rule 4).
    """

    @functools.wraps(fn)
    def made(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Generated(cast("Any", fn), args, kwargs)

    return made
