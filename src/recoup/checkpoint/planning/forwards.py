"""Forwards of modules that go through somebody who follows them.

NOTE [ A followed forward ]

Rule 1. What is called is put on the module as its attribute `forward`, as others do (accelerate);
        class, names, parameters and hooks of the module are not touched. What it calls is looked
        up at every call, so what is applied to the class in the meantime is in force.
Rule 2. A module that compiles its own call (`module.compile()`) has it in another attribute, and
        there what is compiled is what is followed, so that the compiler does not see us.
Rule 3. A copy of a module, and one that comes out of a pickle, is followed by nobody.
Rule 4. Whoever replaces `forward` later is left alone, and ours, beneath it, only passes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from recoup.residuals.compiler import is_loaded, uncompiled
from recoup.residuals.hooks import frame_in_force
from recoup.residuals.seeds import num_repeated

__all__ = ["Follower", "Following", "around"]

_COMPILED = "_compiled_call_impl"
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
    """What stands where a forward was (See Rule 1)."""

    def __init__(self, module: nn.Module, inner: Run | None, follower: Follower | None) -> None:
        self.module = module
        self.inner = inner
        self.follower = follower

    @property
    def __wrapped__(self) -> Run:
        """What others look at for names of arguments."""
        forward: Any = type(self.module).forward
        return self.inner or MethodType(forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.follower is None or not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        if is_loaded() and torch.compiler.is_compiling():
            return uncompiled(_called)(self, args, kwargs)
        return self.follower.called(self.module, self.run, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

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

    Raises:
        ValueError: the forward of one of them goes through another follower already.
    """

    def __init__(self, modules: Iterable[nn.Module], follower: Follower) -> None:
        self._followed: list[tuple[str, _Followed]] = []
        try:
            for module in modules:
                self._follow(module, follower)
        except BaseException:
            self.end()
            raise

    def _follow(self, module: nn.Module, follower: Follower) -> None:
        own = vars(module)
        key = _COMPILED if own.get(_COMPILED) is not None else "forward"
        found = own.get(key)
        if isinstance(found, _Followed):
            if found.follower is not None:
                raise ValueError(
                    f"`model` has a {type(module).__name__} to which a plan is applied already. "
                    "Call `remove()` of that plan first."
                )
            found = found.inner
        own[key] = followed = _Followed(module, found, follower)
        self._followed.append((key, followed))

    def end(self) -> None:
        """Give the modules their forwards back."""
        for key, followed in self._followed:
            followed.follower = None
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
