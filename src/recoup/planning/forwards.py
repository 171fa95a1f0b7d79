"""Forwards of modules that go through a follower, which runs them in its own way.

NOTE [ A followed forward ]

Rule 1. A wrapper is set as the attribute `forward` of the module, as other libraries do
        (accelerate). The class, names, parameters and hooks of the module are not touched. The
        wrapper looks up the forward of the class at every call, so later changes of the class take
        effect. It has the signature, name, code and docstring of the forward that it wraps.
Rule 2. A module that compiles its own call (`module.compile()`) stores it in another attribute.
        The wrapper then wraps the compiled call, so that the compiler does not see the wrapper.
Rule 3. A module that was copied or unpickled has no follower, and neither has a model that was
        traced (torch.export, torch.jit.trace, torch.fx).
Rule 4. If other code replaces `forward` later, that replacement stays, and the wrapper beneath it
        only calls the original forward from then on.
Rule 5. The owner of a follower (a plan) can be found from the modules. An owner may suspend
        others, and then follows the same modules for a while, on top of them.
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
from recoup._core.saved_tensors import checkpoint_in_force

__all__ = ["Follower", "Following", "around", "followed", "followings_within", "suspended"]

_COMPILED = "_compiled_call_impl"
_OF_A_FUNCTION = frozenset((
    "__annotations__", "__code__", "__defaults__", "__kwdefaults__", "__name__", "__qualname__",
    "__type_params__",
))  # fmt: skip
Run = Callable[..., Any]


def around() -> tuple[int, object | None]:
    """Return the number of regions around this code, and the torch checkpoint."""
    return num_repeated(), checkpoint_in_force()


class Follower(Protocol):
    """The interface of a follower, which is called in place of a forward."""

    def called(
        self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of `run`, the forward of `module`, for these arguments."""
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
        """The forward itself, which other code inspects for argument names."""
        forward: Any = type(self.module).forward
        return self.inner or MethodType(forward, self.module)

    @property
    def follower(self) -> Follower | None:
        """The active follower; None after the end, in a copy, and while it is suspended."""
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
        # The function is called on the class: torch.export cannot trace a bound method's creation.
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
    """A group of modules whose forwards go through one follower, until `end`.

    Args:
        modules: the modules.
        follower: the follower that is called in place of their forwards.
        owner: the object that `followings_within` finds from the modules, such as a plan; or None.
        is_held: whether the modules hold a reference to the owner. If not, the following ends when
            the last other reference to the owner is gone.

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
        """The `owner` that was given, if it is alive."""
        return None if self._owner is None else self._owner()

    @property
    def is_over(self) -> bool:
        """Whether the following has ended."""
        return self._follower is None or (self._owner is not None and self._owner() is None)

    @property
    def is_in_place(self) -> bool:
        """Whether the wrappers are still set; code that restores attributes may remove them."""
        return not self.is_over and all(
            any(each is self for each in _followings_of(followed.module))
            for _, followed in self._followed[-1:]
        )

    @property
    def follower(self) -> Follower | None:
        """The follower that is called now in place of the forwards, if any."""
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
        """Restore the forwards of the modules."""
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
    """Yield the followings of `module`, also beneath wrappers of other libraries."""
    for key in (_COMPILED, "forward"):
        found = vars(module).get(key)
        while found is not None:
            if isinstance(found, _Followed) and found.following is not None:
                yield found.following
            found = getattr(found, "__wrapped__", None)


def followings_within(model: nn.Module) -> list[Following]:
    """Return the followings of modules of `model`, each once, in the order of the modules."""
    found = {id(each): each for module in model.modules() for each in _followings_of(module)}
    return [each for each in found.values() if not each.is_over]


@restoring
def suspended(followings: Iterable[Following]) -> Generator[None]:
    """Return a context in which these followings are suspended (See Rule 5)."""
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
    """Return a context in which the forwards of `modules` go through `follower`."""
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
