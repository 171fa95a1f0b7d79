"""Forwards of modules that go through somebody who follows them.

NOTE [ A followed forward ]

Rule 1. What is called is put on the module as its attribute `forward`, as others do (accelerate);
        class, names, parameters and hooks of the module are not touched. What it calls is looked
        up at every call, so what is applied to the class in the meantime is in force. To others it
        looks like the function that it stands for: its signature, name, code and docstring.
Rule 2. A module that compiles its own call (`module.compile()`) has it in another attribute, and
        there what is compiled is what is followed, so that the compiler does not see us.
Rule 3. A copy of a module, and one that comes out of a pickle, is followed by nobody. So is what
        others make of a model by tracing it (torch.export, torch.jit.trace, torch.fx).
Rule 4. Whoever replaces `forward` later is left alone, and ours, beneath it, only passes on.
Rule 5. Who owns what is followed can be found from the modules. One owner may ask for others to be
        suspended, and then follows the same modules for a while, on top of them.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from recoup._core.compile import is_loaded, is_traced, uncompiled
from recoup._core.restoring import Undoing, restoring
from recoup._core.rng import num_repeated
from recoup._core.saved_tensors import frame_in_force

__all__ = ["Follower", "Following", "around", "followed", "followings_within", "suspended"]

_COMPILED = "_compiled_call_impl"
_OF_A_FUNCTION = frozenset((
    "__annotations__", "__code__", "__defaults__", "__kwdefaults__", "__name__", "__qualname__",
    "__type_params__",
))  # fmt: skip
Run = Callable[..., Any]


def around() -> tuple[int, object | None]:
    """Return what is around that runs forwards again: how many regions of ours, and of torch."""
    return num_repeated(), frame_in_force()


class Follower(Protocol):
    """Who is called in the place of a forward."""

    def called(
        self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what `run`, the forward of `module`, returns for these arguments."""
        ...


class _Followed:
    """The forward of a module, which goes through a follower (See Rule 1)."""

    def __init__(self, module: nn.Module, inner: Run | None, following: Following | None) -> None:
        self.module = module
        self.inner = inner
        self.following = following
        wrapped = self.__wrapped__
        self.__doc__ = wrapped.__doc__
        self.__module__ = getattr(wrapped, "__module__", __name__)

    @property
    def __wrapped__(self) -> Run:
        """The forward itself, at which others look for names of arguments."""
        forward: Any = type(self.module).forward
        return self.inner or MethodType(forward, self.module)

    @property
    def follower(self) -> Follower | None:
        """Who is called now; None after the end, in a copy, and while it is suspended."""
        return None if self.following is None else self.following.follower

    def __getattr__(self, name: str) -> Any:
        if name in _OF_A_FUNCTION:
            return getattr(self.__wrapped__, name)
        raise AttributeError(
            f"The forward of this {type(self.module).__name__} goes through a plan and has no "
            f"attribute {name!r}. For what needs it (torch.jit.script), remove the plan first: "
            "`for plan in recoup.applied_plans(model): plan.remove()`."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        follower = self.follower
        if follower is None or not torch.is_grad_enabled() or is_traced():
            return self.run(*args, **kwargs)
        if is_loaded() and torch.compiler.is_compiling():
            return uncompiled(_called)(self, args, kwargs)
        return follower.called(self.module, self.run, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        # Without a bound method, which torch.export cannot make while it traces.
        return type(self.module).forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Followed:
        return _Followed(copy.deepcopy(self.module, memo), copy.deepcopy(self.inner, memo), None)

    def __reduce__(self) -> Any:
        return _Followed, (self.module, self.inner, None)  # See Rule 3


def _called(followed: _Followed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if followed.follower is None:
        return followed.run(*args, **kwargs)
    return followed.follower.called(followed.module, followed.run, args, kwargs)


class Following:
    """Modules whose forwards go through one follower, until `end`.

    Args:
        modules: the modules.
        follower: who is called in the place of their forwards.
        owner: what is found again from the modules (`followings_within`), such as a plan. None if
            nothing is.
        is_held: whether the modules hold the owner. If not, nothing is followed any more when
            nobody else holds it.

    Raises:
        ValueError: the forward of one of them goes through another follower already.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        follower: Follower,
        owner: object | None = None,
        *,
        is_held: bool = True,
    ) -> None:
        self._follower: Follower | None = follower
        self._owner: Callable[[], object | None] | None = None
        if owner is not None:
            self._owner = (lambda: owner) if is_held else weakref.ref(owner)
        self.suspensions: list[object] = []
        self._followed: list[tuple[str, _Followed]] = []
        try:
            for module in modules:
                self._follow(module)
        except BaseException:
            self.end()
            raise

    @property
    def owner(self) -> object | None:
        """What was given as `owner`, if it is alive."""
        return None if self._owner is None else self._owner()

    @property
    def is_over(self) -> bool:
        """Whether nothing is followed any more."""
        return self._follower is None or (self._owner is not None and self._owner() is None)

    @property
    def is_in_place(self) -> bool:
        """Whether the modules still go through it; what restores attributes may take it off."""
        return not self.is_over and all(
            any(each is self for each in _followings_of(followed.module))
            for _, followed in self._followed[-1:]
        )

    @property
    def follower(self) -> Follower | None:
        """Who is called in the place of the forwards now."""
        return None if self.suspensions or self.is_over else self._follower

    def is_for(self, follower: Follower) -> bool:
        """Whether the forwards go through this follower."""
        return self._follower is follower

    def _follow(self, module: nn.Module) -> None:
        _check_is_free(module)
        own = vars(module)
        key = _COMPILED if own.get(_COMPILED) is not None else "forward"
        found = own.get(key)
        while isinstance(found, _Followed) and (found.following is None or found.following.is_over):
            found = found.inner
        followed = _Followed(module, found, self)
        self._followed.append((key, followed))
        own[key] = followed

    def end(self) -> None:
        """Give the modules their forwards back."""
        self._follower = None
        for key, followed in self._followed:
            followed.following = None
            own = vars(followed.module)
            if own.get(key) is not followed:
                continue  # See Rule 4
            if followed.inner is not None:
                own[key] = followed.inner
            elif key == "forward":
                del own[key]
            else:
                own[key] = None
        self._followed.clear()


def _check_is_free(module: nn.Module) -> None:
    """Raise if the forward of `module` goes through a follower that is not suspended."""
    if not any(each.follower is not None for each in _followings_of(module)):
        return
    gc.collect()  # the owner may be garbage
    for each in _followings_of(module):
        if each.follower is not None:
            owner = each.owner
            whose = "while another model that shares it is being planned"
            if owner is not None:
                kind = type(getattr(owner, "model", owner)).__name__
                whose = f"already (a {kind}, which shares it)"
            raise ValueError(
                f"`model` has a {type(module).__name__} that follows the plan of another model "
                f"{whose}. Remove that plan first: "
                "`for plan in recoup.applied_plans(model): plan.remove()`. Where a chain plans "
                'itself (its `memory` is bytes), set `memory="linear"` there.'
            )


def _followings_of(module: nn.Module) -> Iterator[Following]:
    """Yield what follows `module`, also beneath forwards that others have wrapped it in."""
    for key in (_COMPILED, "forward"):
        found = vars(module).get(key)
        while found is not None:
            if isinstance(found, _Followed) and found.following is not None:
                yield found.following
            found = getattr(found, "__wrapped__", None)


def followings_within(model: nn.Module) -> list[Following]:
    """Return what follows modules of `model`, each once, in the order of the modules."""
    found = {id(each): each for module in model.modules() for each in _followings_of(module)}
    return [each for each in found.values() if not each.is_over]


@restoring
def suspended(followings: Iterable[Following]) -> Generator[None]:
    """Return a context in which nobody is called for these (See Rule 5)."""
    suspension = object()
    with Undoing() as undo:
        for each in followings:
            undo.later(_go_on, each, suspension)
            each.suspensions.append(suspension)
        yield


def _go_on(following: Following, suspension: object) -> None:
    if suspension in following.suspensions:
        following.suspensions.remove(suspension)


@restoring
def followed(modules: Iterable[nn.Module], follower: Follower) -> Generator[None]:
    """Return a context in which the forwards of modules go through a follower."""
    modules = list(modules)
    with Undoing() as undo:
        undo.later(_unfollow, modules, follower)
        Following(modules, follower)
        yield


def _unfollow(modules: Sequence[nn.Module], follower: Follower) -> None:
    found = {id(each): each for module in modules for each in _followings_of(module)}
    for each in found.values():
        if each.is_for(follower):
            each.end()
