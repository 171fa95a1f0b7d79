"""Classes that stand in for the classes of modules: the same names, and other members.

NOTE [ A class on top of a module's own ]

Rule 1. A stand-in is a subclass of a module's class with its name and signature. There is one for
        each base class, maker and arguments. It cannot be imported, so a module is copied and
        pickled as its own class and a recipe: the makers, which can be imported.
Rule 2. Stand-ins of several makers may be on top of each other, in any order. What a maker has put
        there is replaced in its place.
Rule 3. The forward of each class has a code object of its own. The compiler records by code
        object what it compiled, how often, and what it cannot compile; if all classes shared one,
        one layer that cannot be compiled would keep every other layer from being compiled.
Rule 4. A stand-in may run a forward that belongs to one module alone, its `OWN_FORWARD` (a plan's).
        It is on top of all others, and a mixin before its base. A copy or a pickle has neither it
        nor that attribute, and loads where recoup is not installed. What copies attributes in other
        ways keeps both, so such a stand-in looks whose forward it finds.
Rule 5. To its base a stand-in is a subclass as any other: `__init_subclass__` and metaclasses are
        called, and what they raise is raised. A base that asks for arguments there has none. A
        mixin may see to it that `__init_subclass__` is not called. Python lets no object change to
        a class with a mixin before `class Block(ABC, nn.Module)`: there our class has its forward
        alone, and `__init_subclass__` is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

Kind = type[nn.Module]
Maker = Callable[..., Kind]
_STEP = "_recoup_stand_in"
OWN_FORWARD = "_recoup_forward"
REPLACED_FORWARDS = frozenset(("forward", OWN_FORWARD))  # attributes of one module


class Step(NamedTuple):
    """A maker of stand-ins, what it is given beside the base class, and whether copies have it."""

    make: Maker
    arguments: tuple[Any, ...]
    is_copied: bool = True


def new_stand_in(
    base: Kind,
    make: Maker,
    arguments: tuple[Any, ...],
    members: Callable[[], dict[str, Any]],
    mixin: type | None = None,
) -> Kind:
    """Return the stand-in that `make` has for `base` and `arguments`: the known one, or a new one.

    Args:
        base: the class beneath it.
        make: a function of a module, which calls this one.
        arguments: what `make` is given after `base`; can be pickled.
        members: returns the members of a new one; its `forward`, if any, is a function of its own.
        mixin: a class before the base, of a stand-in that copies do not have (See Rule 4).
    """
    step = Step(make, arguments, mixin is None)
    own_forward = None if mixin is None else vars(mixin).get("forward")
    for known in base.__subclasses__():
        own = vars(known)
        # Other code may have set the forward of a class that has that of the mixin.
        if own.get(_STEP) == step and (mixin is None or own.get("forward") in (None, own_forward)):
            return known
    made: dict[str, Any] = {
        _STEP: step,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reducing(base),
        **members(),
    }
    forward: Any = made.get("forward")
    if forward is not None:  # See Rule 3
        forward.__code__ = forward.__code__.replace(co_qualname=f"{base.__qualname__}.forward")
    bases = (base,) if mixin is None else (mixin, base)
    if mixin is not None and not _is_laid_out_as_a_module(base):
        bases, made["forward"] = (base,), own_forward
    return cast("Any", type(base))(base.__name__, bases, made)


def _is_laid_out_as_a_module(kind: type | None) -> bool:
    """Whether objects of a class lie in memory as nn.Module's do: not those of (ABC, Module)."""
    while kind is not None and kind is not nn.Module:
        kind = kind.__base__
    return kind is not None


def with_stand_in(kind: Kind, make: Maker, *arguments: Any, is_copied: bool = True) -> Kind:
    """Return `kind` with the stand-in of `make` in it, in its place or else on top (See Rule 2)."""
    own, steps = _taken_apart(kind)
    new = Step(make, arguments, is_copied)
    replaced = [new if step.make is make else step for step in steps]
    steps = replaced if new in replaced else [*steps, new]
    return _put_together(own, sorted(steps, key=lambda step: not step.is_copied))


def without_stand_in(kind: Kind, make: Maker) -> Kind:
    """Return `kind` without the stand-in of `make`."""
    own, steps = _taken_apart(kind)
    return _put_together(own, [step for step in steps if step.make is not make])


def is_stand_in(kind: type) -> bool:
    """Whether a class stands in for another."""
    return _STEP in vars(kind)


def check_has_own_forward(module: nn.Module) -> None:
    """Raise if a stand-in could not extend the forward of `module`."""
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    if is_scripted or not REPLACED_FORWARDS.isdisjoint(vars(module)):
        raise ValueError(
            f"`module` has a {type(module).__name__} whose `forward` was replaced (compiled, "
            "hooked or scripted), so recoup cannot extend it. Apply this before that."
        )
    check_can_be_derived_from(type(module))


def check_can_be_derived_from(kind: Kind) -> None:
    """Raise if subclasses of `kind` have to give arguments (See Rule 5)."""
    if not isinstance(kind.__init_subclass__, MethodType):  # that of `object`
        return
    try:
        inspect.signature(kind.__init_subclass__).bind()
    except TypeError as error:
        raise ValueError(
            f"`module` has a {kind.__name__}, which recoup cannot extend: a subclass has to give "
            f"arguments ({error}). Give those of its `__init_subclass__` defaults."
        ) from error


def _taken_apart(kind: Kind) -> tuple[Kind, list[Step]]:
    """Return a module's own class, and the steps from it to `kind`."""
    if not is_stand_in(kind):
        return kind, []
    own, steps = _taken_apart(cast("Kind", kind.__bases__[-1]))
    return own, [*steps, vars(kind)[_STEP]]


def _put_together(own: Kind, steps: list[Step]) -> Kind:
    for step in steps:
        own = step.make(own, *step.arguments)
    return own


def _reducing(base: Kind) -> Any:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        made, given, *rest = cast("Any", base.__reduce_ex__(self, protocol))
        kind = type(self)
        if rest and isinstance(rest[0], dict):
            state = cast("dict[str, Any]", rest[0])
            rest[0] = {key: value for key, value in state.items() if key != OWN_FORWARD}
        if vars(kind).get("__reduce_ex__") is not reduce or given[:1] != (kind,):
            return made, given, *rest
        own, steps = _taken_apart(kind)
        steps = [step for step in steps if step.is_copied]
        return ((_new, (own, steps)) if steps else (object.__new__, (own,))) + tuple(rest)

    return reduce


def _new(own: Kind, steps: list[Step]) -> nn.Module:
    return nn.Module.__new__(_put_together(own, steps))
