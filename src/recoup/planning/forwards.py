"""Forwards of modules that go through a follower, which runs them in its own way.

NOTE [ A followed forward ]

Rule 1. A wrapper is kept in an attribute of the module, and a class that stands in for its own
        returns it as `forward`, to that module alone: a module that shares the attributes (a
        shallow copy, `higher`, DataParallel) runs its own forward. The names, parameters and hooks
        of the module are not touched. The wrapper looks up the forward of the class at every call,
        so later changes of the class take effect. It has the signature, name, code and docstring of
        the forward that it wraps.
Rule 2. Where other code has set an attribute `forward` (accelerate), or the module compiles its own
        call (`module.compile()`), that attribute is the module's and no longer the class's matter,
        and the wrapper takes its place. So the compiler does not see the wrapper.
Rule 3. A module that was copied or unpickled has no follower, and neither has a model that was
        traced (torch.export, torch.jit.trace, torch.fx). Files load where recoup is not installed.
Rule 4. If other code replaces `forward` later, that replacement stays, and the wrapper within it
        only calls the original forward from then on.
Rule 5. The owner of a follower (a plan) can be found from the modules. An owner may suspend
        others, and then follows the same modules for a while, on top of them.
"""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recoup._core.compile import is_traced, uncompiled
from recoup._core.modules import (
    OWN_FORWARD,
    is_gathered,
    is_stand_in,
    new_stand_in,
    with_stand_in,
    without_stand_in,
)
from recoup._core.rng import num_repeated
from recoup._core.saved_tensors import frame_in_force, version_of
from recoup.planning.blocks import ModuleGroup, are_groups_of, run_groups

_COMPILED = "_compiled_call_impl"
_OF_A_FUNCTION = frozenset((
    "__annotations__", "__code__", "__defaults__", "__kwdefaults__", "__name__", "__qualname__",
    "__type_params__",
))  # fmt: skip
Forward = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_COMPILED_AROUND = (
    "A model that follows a plan was given to torch.compile. Its planned blocks run uncompiled, "
    "between graphs of the code around them. Plan with compile=True instead, which compiles the "
    "blocks."
)
_OTHER_MODULES = (
    "An nn.Sequential of a planned model has other modules than when the plan was made. It runs "
    "without the plan: gradients are right, but it may take more memory. Make a new plan."
)


class Follower(Protocol):
    """The interface of a follower, which is called in place of a forward."""

    def called(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs, /) -> Any:
        """Return the result of `forward`, the forward of `module`, for these arguments."""
        ...


class _WrappedForward:
    """The forward of a module, which goes through a follower (See Rule 1).

    Args:
        module: the module.
        wrapped: the attribute of the module that it replaces; None for the forward of the class.
        group: the wrapped forwards that it belongs to; None after their end.
        parts: the groups of modules that run in place of the modules of a sequence.
        is_followed: whether the follower is called, and not only for the groups.
    """

    def __init__(
        self,
        module: nn.Module,
        wrapped: Forward | None,
        group: WrappedForwards | None,
        parts: Sequence[ModuleGroup] = (),
        *,
        is_followed: bool = True,
    ) -> None:
        self.module = module
        self.parts = parts
        self.is_followed = is_followed
        self.wrapped = wrapped
        self.group = group
        forward = self.__wrapped__
        self.__doc__ = forward.__doc__
        self.__module__ = getattr(forward, "__module__", __name__)

    @property
    def __wrapped__(self) -> Forward:
        """The forward itself, which other code inspects for argument names."""
        kind: Any = type(self.module)
        beneath = kind.forward  # a function, also where the class stands in for another
        return self.wrapped or MethodType(beneath, self.module)

    @property
    def follower(self) -> Follower | None:
        """The active follower; None after the end, and while it is suspended."""
        return None if self.group is None else self.group.follower

    def __getattr__(self, name: str) -> Any:
        if name in _OF_A_FUNCTION:
            return getattr(self.__wrapped__, name)
        raise AttributeError(
            f"The forward of this {type(self.module).__name__} follows a plan and has no "
            f"attribute {name!r}. Remove the plan before you use something that needs it (such as "
            "torch.jit.script): `for plan in recoup.applied_plans(model): plan.remove()`."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module and not _fits(self.__wrapped__, args, kwargs):
            args = args[1:]  # accelerate has bound what it took for a function
        follower = self.follower
        if follower is None or not torch.is_grad_enabled() or is_traced():
            return self.run(*args, **kwargs)
        if torch.compiler.is_compiling():
            return uncompiled(_follow)(self, follower, args, kwargs, _COMPILED_AROUND)
        return _follow(self, follower, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.wrapped is not None:
            return self.wrapped(*args, **kwargs)
        # torch.export can trace neither what `__wrapped__` does nor a descriptor on a class.
        if isinstance(self.module, _Followed):
            return super(_Followed, self.module).forward(*args, **kwargs)
        above = _standing(type(self.module))
        if above is not None:
            return super(above, self.module).forward(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> Any:
        return getattr, (partial(self.__wrapped__), "func")  # that is what it wraps (See Rule 3)


def _fits(forward: Forward, args: Args, kwargs: Kwargs) -> bool:
    try:
        inspect.signature(forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # it takes others, or says nothing of what it takes
        return False
    return True


class _OwnForward:
    """The `forward` of a module in a class that stands in for its own (See Rule 1)."""

    def __get__(self, module: nn.Module | None, kind: type[nn.Module]) -> Forward:
        # The compiler of torch 2.11 cannot guard a search among the bases.
        above: Any = _Followed if issubclass(kind, _Followed) else _standing(kind)
        if module is None:
            return super(above, kind).forward
        own: _WrappedForward | None = vars(module).get(OWN_FORWARD)
        if own is not None and own.module is module:
            return own
        return super(above, module).forward


def _standing(kind: type) -> Any:
    """Return the class among the bases of `kind` that has the forward of a plan."""
    return next((e for e in kind.__mro__ if isinstance(vars(e).get("forward"), _OwnForward)), None)


class _Followed(nn.Module):
    """What is put before the class of a module that is followed."""

    forward: Any = _OwnForward()

    def __init_subclass__(cls, **options: Any) -> None:
        """Do what the class beneath does, unless it is its stand-in: it may change what it sees."""
        if not is_stand_in(cls):
            super().__init_subclass__(**options)


def _followed_class(base: type[nn.Module]) -> type[nn.Module]:
    return new_stand_in(base, _followed_class, (), dict, _Followed)


def own_forward(forward: Forward) -> Forward:
    """Return the forward beneath wrappers that do not follow now (those of a suspended plan)."""
    while isinstance(forward, _WrappedForward) and forward.follower is None:
        forward = forward.__wrapped__
    return forward


def _follow(
    forward: _WrappedForward, follower: Follower, args: Args, kwargs: Kwargs, message: str = ""
) -> Any:
    run = forward.__wrapped__
    if forward.parts and are_groups_of(forward.parts, forward.module):
        run = partial(run_groups, forward.parts)
    elif forward.parts:
        message = _OTHER_MODULES
    if message and forward.group is not None:
        forward.group.warn_once(message)
    if not forward.is_followed:
        return run(*args, **kwargs)
    return follower.called(forward.module, run, args, kwargs)


class WrappedForwards:
    """The forwards of a group of modules, which go through one follower from `begin` to `end`.

    `wrapped_forwards_in` finds the owner, such as a plan, from the modules. If they do not hold it,
    its last other reference ends the following.
    """

    def __init__(
        self, follower: Follower, owner: object | None = None, *, is_held: bool = True
    ) -> None:
        self._follower: Follower | None = follower
        self._owner: Callable[[], object | None] | None = None
        if owner is not None:
            self._owner = (lambda: owner) if is_held else weakref.ref(owner)
        self._forwards: list[tuple[str, _WrappedForward]] = []
        self.suspensions: set[object] = set()
        self._warnings: set[str] = set()  # that were given

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Wrap the forwards of `modules`; a ValueError if another plan has them, or torch.jit."""
        modules = list(modules)
        followed = set(map(id, modules))
        parts: dict[nn.Module, list[ModuleGroup]] = {}  # of sequences
        for module in modules:
            if isinstance(module, ModuleGroup) and module.sequence is not None:
                parts.setdefault(module.sequence, []).append(module)
        with ExitStack() as stack:
            stack.callback(self.end)
            for module in dict.fromkeys([*parts, *modules]):
                self._wrap(module, parts.get(module, ()), is_followed=id(module) in followed)
            stack.pop_all()

    def warn_once(self, message: str) -> None:
        """Warn, if this was not said before."""
        if message not in self._warnings:
            self._warnings.add(message)
            warnings.warn(message, stacklevel=3)

    @property
    def owner(self) -> object | None:
        """The `owner` that was given, if it is alive."""
        return None if self._owner is None else self._owner()

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called, or the owner is gone."""
        return self._follower is None or (self._owner is not None and self._owner() is None)

    @property
    def is_in_place(self) -> bool:
        """Whether the wrappers are still set; code that restores attributes may remove them."""
        last = self._forwards[-1:]
        return not self.has_ended and all(self in _groups_of(each.module) for _, each in last)

    @property
    def follower(self) -> Follower | None:
        """The follower that is called now in place of the forwards, if any."""
        return None if self.suspensions or self.has_ended else self._follower

    def _wrap(self, module: nn.Module, parts: Sequence[ModuleGroup], *, is_followed: bool) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"A {module.original_name} that torch.jit has scripted or traced calls code that "
                "nothing can follow. Plan the model as it was before, or name other `blocks`."
            )
        _check_is_free(module)
        own = vars(module)
        key = "forward" if "forward" in own else OWN_FORWARD
        key = _COMPILED if own.get(_COMPILED) is not None else key
        found = own.get(key)
        while isinstance(found, _WrappedForward) and (found.group is None or found.group.has_ended):
            found = found.wrapped
        forward = _WrappedForward(module, found, self, parts, is_followed=is_followed)
        self._forwards.append((key, forward))
        own[key] = forward
        if key == OWN_FORWARD and _standing(type(module)) is None:
            kind = with_stand_in(type(module), _followed_class, is_copied=False)
            object.__setattr__(module, "__class__", kind)

    def end(self) -> None:
        """Restore the forwards of the modules."""
        self._follower = None
        for key, forward in self._forwards:
            forward.group = None
            own = vars(forward.module)
            if own.get(key) is not forward:
                continue  # See Rule 4
            if forward.wrapped is not None:
                own[key] = forward.wrapped
            elif key == _COMPILED:
                own[key] = None
            else:
                del own[key]
                kind = without_stand_in(type(forward.module), _followed_class)
                object.__setattr__(forward.module, "__class__", kind)
        self._forwards.clear()


def _check_is_free(module: nn.Module) -> None:
    """Raise if the forward of `module` goes through a follower that is not suspended."""
    if any(each.follower is not None for each in _groups_of(module)):
        gc.collect()  # the owner may be garbage
    for each in _groups_of(module):
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


def _groups_of(module: nn.Module) -> Iterator[WrappedForwards]:
    """Yield the groups that `module` belongs to, also within wrappers of other libraries."""
    for key in (_COMPILED, "forward", OWN_FORWARD):
        found = vars(module).get(key)
        while found is not None:
            if isinstance(found, _WrappedForward) and found.group is not None:
                yield found.group
            found = getattr(found, "__wrapped__", None)


def wrapped_forwards_in(model: nn.Module) -> list[WrappedForwards]:
    """Return the groups of modules of `model`, each once, in the order of the modules."""
    found = {id(each): each for module in model.modules() for each in _groups_of(module)}
    return [each for each in found.values() if not each.has_ended]


@contextmanager
def suspended(groups: Iterable[WrappedForwards]) -> Generator[None]:
    """Return a context in which these forwards do not go through their followers (See Rule 5)."""
    suspension = object()
    with ExitStack() as stack:
        for each in groups:
            each.suspensions.add(suspension)
            stack.callback(each.suspensions.discard, suspension)
        yield


@contextmanager
def followed(modules: Iterable[nn.Module], follower: Follower) -> Generator[None]:
    """Return a context in which the forwards of `modules` go through `follower`."""
    forwards = WrappedForwards(follower)
    with ExitStack() as stack:
        stack.callback(forwards.end)
        forwards.begin(modules)
        yield


def enclosing_checkpoints() -> tuple[int, object | None]:
    """Return the number of regions around this code, and the frame of a torch checkpoint."""
    return num_repeated(), frame_in_force()


class CallOutputs:
    """The tensors that a call returned, held weakly, and recognized as arguments later."""

    __slots__ = ("_outputs",)

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._outputs = [(weakref.ref(output), version_of(output)) for output in outputs]

    def indices_in(
        self, arguments: Sequence[Tensor], module: nn.Module
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the indices of the arguments that are outputs, and the indices of these outputs.

        An output that was changed in place since does not count, and none does if `module` is
        sharded: FSDP2 would not gather its parameters when the backward of another block needs it
        run again.
        """
        if is_gathered(module):
            return (), ()
        found = {
            id(output): index
            for index, (ref, version) in enumerate(self._outputs)
            if (output := ref()) is not None and version_of(output) == version
        }
        pairs = [(index, found[id(arg)]) for index, arg in enumerate(arguments) if id(arg) in found]
        return tuple(index for index, _ in pairs), tuple(output for _, output in pairs)
