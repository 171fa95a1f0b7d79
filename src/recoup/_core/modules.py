"""Modules: what they say of how they run and are inverted, and classes that stand in for theirs.

NOTE [ A class on top of a module's own ]

Rule 1. A stand-in is a subclass of a module's class with its name and signature. There is one for
        each base class, maker and arguments. It cannot be imported, so a module is copied and
        pickled as its own class and a recipe: the makers, which can be imported.
Rule 2. Stand-ins of several makers may be on top of each other, in any order. What a maker has put
        there is replaced in its place.
Rule 3. The forward of each class has a code object of its own. The compiler records by that what it
        compiled and what it cannot; one shared by all would keep every layer from being compiled.
Rule 4. A stand-in may run a forward that belongs to one module alone, its `OWN_FORWARD` (a plan's).
        It is on top of all others, and a mixin before its base. A copy or a pickle has neither it
        nor that attribute, and loads where recoup is not installed. What copies attributes in other
        ways keeps both, so such a stand-in looks whose forward it finds.
Rule 5. To its base a stand-in is a subclass as any other: `__init_subclass__` and metaclasses are
        called, and what they raise is raised. A base that asks for arguments there has none; a
        mixin may see to it that it is not called. Python lets no object change to a class with a
        mixin before `class Block(ABC, nn.Module)`: there our class has its forward alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn


def is_gathered(module: nn.Module) -> bool:
    """Whether FSDP2 gathers the parameters of `module` for its calls, and frees them afterwards."""
    return hasattr(type(module), "unshard")


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_hooked(module: object) -> bool:
    """Whether hooks run when `module` is called: calls of its parts are not the same."""
    return isinstance(module, nn.Module) and any(vars(module)[name] for name in HOOKS)


def are_in_place(callables: Iterable[Any]) -> list[bool]:
    """Return for each callable whether the first thing that it does changes its input in place."""
    firsts: list[Any] = []
    for first in callables:
        while isinstance(first, nn.Sequential) and first._modules:
            first = next(iter(first._modules.values()))
        firsts.append(first)
    return list(map(bool, marks_of(firsts, "inplace")))


def mark_of(fn: Any, name: str) -> Any:
    """Return an attribute that marks a module, of its own or of its class; False without one."""
    return marks_of((fn,), name)[0]


def marks_of(callables: Iterable[Any], name: str) -> list[Any]:
    """Return what `mark_of` does for each callable, in one call of Python."""
    marks: list[Any] = []
    for fn in callables:
        kind: Any = fn.__class__
        if getattr(kind, "__getattr__", None) is nn.Module.__getattr__:  # it would look, slowly
            marks.append(fn.__dict__.get(name, getattr(kind, name, False)))
        else:
            marks.append(getattr(fn, name, False))
    return marks


Direction = Literal["forward", "inverse"]


def has_inverse(link: object) -> bool:
    """Whether an object defines `inverse`; a base class may mark its own as missing."""
    method = getattr(link, "inverse", None)
    return callable(method) and not getattr(method, "is_missing", False)


def check_pair(
    returned: Any, num_samples: int, direction: Direction, name: str, *, num_early: int = 0
) -> tuple[Any, Tensor]:
    """Return what an invertible module returned; raise if that is no value and log-determinant.

    A module that forgets the log-determinant returns one tensor, which would be unpacked along the
    batch: for two samples without an error. The value is a tuple if latents are split off early.
    """
    wrong = _why_not_pair(returned, num_samples, num_early)
    if wrong is None:
        return returned
    raise ValueError(
        f"`{direction}` of {name} returned {wrong}. Return (value, log_det): the value with the "
        f"{num_samples} samples of the batch, and its log-determinant, real and of shape "
        f"({num_samples},), on the device of the value; `x.new_zeros(len(x))` where the volume "
        "does not change."
    )


def _why_not_pair(returned: Any, num_samples: int, num_early: int) -> str | None:
    """Return a description of `returned` if it is not such a pair, or None."""
    if not _is_sequence(returned) or len(returned) != 2:
        return _shown(returned)
    value, log_det = returned
    parts: Sequence[Any] = value if num_early and _is_sequence(value) else (value,)
    if num_early and len(parts) != num_early + 1:
        return f"{_shown(value)} as the value, where {num_early + 1} parts are due"
    for part in parts:
        if not isinstance(part, Tensor) or part.shape[:1] != (num_samples,):
            return f"{_shown(part)} as the value"
    if not isinstance(log_det, Tensor):
        return f"{_shown(log_det)} as the log-determinant"
    is_real = log_det.is_floating_point() or not (
        log_det.is_complex() or parts[0].is_floating_point()  # integer values allow integers
    )
    if log_det.shape != (num_samples,) or not is_real or log_det.device != parts[0].device:
        return f"{_shown(log_det)} on {log_det.device} as the log-determinant"
    return None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, tuple | list)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    kind = type(value).__name__
    return f"a {kind} of {len(value)} values" if _is_sequence(value) else f"a {kind}"


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
        check_can_be_derived_from(base)
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
