"""Classes that stand in for the classes of modules with reparametrized weights.

NOTE [ A module changes its class and nothing else ]

Rule 1. The class is a subclass of the module's own, with the same name and signature, in which
        each reparametrized parameter is a property. In a forward it reads as the weight that the
        forward uses, and otherwise as the parameter itself, so that code that initialises, assigns,
        saves or steps sees the parameter. Parameters are never replaced or registered anew.
Rule 2. There is one such class for each class and set of names. It cannot be imported, so a module
        is copied and pickled as its own class and the names.
Rule 3. The state of one module is in its `__dict__`, and is copied and pickled with it.
Rule 4. The forward of each class has a code object of its own. The compiler records by code
        object what it compiled, how often, and what it cannot compile; if all classes shared one,
        one recurrent layer would keep every other layer from being compiled.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.compile import not_compiled_itself, uncompiled
from recoup.weights.embedding import forward_by_rows
from recoup.weights.forwards import Forward, frames
from recoup.weights.graph import forward_in_graph, read_in_graph
from recoup.weights.outside import look_at_part
from recoup.weights.place import Place
from recoup.weights.recurrent import members_of_recurrent
from recoup.weights.reparametrization import Application

__all__ = ["Attached", "attach", "attached_to", "is_swapped", "restore_class", "swap_class"]

_KEY = "_recoup_attached"
_NAMES = "_recoup_names"
_BASE = "_recoup_base"


class Attached:
    """The state of a reparametrized module: its parameters, and the applications to its tree."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.covered: list[Application] = []
        self.roots: list[Application] = []  # those that were applied to this module itself
        self.applications: tuple[Application, ...] = ()
        self.breaks = False  # whether a graph of its forward breaks at a recurrent layer

    def check(self, module: nn.Module) -> None:
        """Raise if a parameter was removed, which would lose its reparametrizations."""
        parameters = module._parameters
        for key in self.places:
            if key not in parameters and key not in module.__dict__:
                raise ValueError(
                    f"`{key}` of {type(module).__name__} is no parameter of it any more (a "
                    "parametrization of torch has taken it?), so what recoup applied to it would "
                    "be lost. Call recoup.weights.remove before taking it away."
                )

    def refresh(self) -> None:
        """Bring `applications` up to date: a forward of the module covers them."""
        own = [a for place in self.places.values() for a in place.applications]
        self.applications = tuple(dict.fromkeys((*self.covered, *own)))


def attached_to(module: nn.Module) -> Attached | None:
    """Return the state that `module` carries, or None if nothing was applied to it."""
    return module.__dict__.get(_KEY)


def is_swapped(module: nn.Module) -> bool:
    """Whether the class of `module` is such a stand-in, and not a subclass of one."""
    return _NAMES in vars(type(module))


def attach(module: nn.Module) -> Attached:
    """Return the state that `module` carries; give it an empty one if it has none."""
    return module.__dict__.setdefault(_KEY, Attached())


def swap_class(module: nn.Module) -> None:
    """Give `module` the class for the parameters that it carries."""
    attached = attach(module)
    attached.refresh()
    attached.breaks = any(isinstance(part, nn.RNNBase) for part in module.modules())
    base = vars(type(module))[_BASE] if is_swapped(module) else type(module)
    module.__class__ = _class_for(base, tuple(sorted(attached.places)))


def restore_class(module: nn.Module) -> None:
    """Give `module` its own class back, and delete the state that it carried."""
    del module.__dict__[_KEY]
    if is_swapped(module):  # not if a wrapper's class is on top of ours, which then passes calls on
        module.__class__ = vars(type(module))[_BASE]


def _class_for(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    for known in base.__subclasses__():
        if vars(known).get(_NAMES) == names:
            return known
    members: dict[str, Any] = {name: _property(name) for name in names}
    is_recurrent = issubclass(base, nn.RNNBase)  # the compiler does not trace those either
    if is_recurrent:
        members |= members_of_recurrent(base)
    if issubclass(base, nn.ParameterList):
        members["__getitem__"] = _slicing(base)
    run = forward_by_rows(base.forward) if issubclass(base, nn.Embedding) else base.forward
    members |= {
        _NAMES: names,
        _BASE: base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reducing(base, names),
        "forward": _with_own_code(
            _forward_through(base.forward, run, may_be_compiled=not is_recurrent),
            f"{base.__qualname__}.forward",
        ),
        "register_parameter": _registering(base),
        "extra_repr": _shown(base),
        "_load_from_state_dict": _loading(base),
    }
    if type(base) is type:
        with suppress(TypeError):  # a base with slots
            # The base is set afterwards, so that its `__init_subclass__` does not run.
            made = cast("type[nn.Module]", type(base.__name__, (nn.Module,), members))
            made.__bases__ = (base,)
            return made
    made_by: Any = type(base)
    return made_by(base.__name__, (base,), members)


def _property(name: str) -> property:
    def read(module: nn.Module) -> Tensor | None:
        own = module.__dict__
        parameters = own.get("_parameters") or own
        if name not in parameters and name not in own:
            raise AttributeError(name)  # Python then calls `__getattr__`
        raw = parameters[name] if name in parameters else own[name]
        attached = attached_to(module)
        place = None if attached is None else attached.places.get(name)
        if place is None or raw is None:
            return raw
        if torch.compiler.is_compiling():
            return read_in_graph(place, module, raw)
        return place.read(module, raw)

    def assign(module: nn.Module, value: Any) -> None:
        module.__dict__[name] = value  # a replica of DataParallel has tensors for parameters

    return property(read, assign)


def _forward_through(forward: Any, run: Any, *, may_be_compiled: bool) -> Any:
    @not_compiled_itself
    def in_progress(self: nn.Module, attached: Attached, args: Any, kwargs: Any) -> Any:
        forward = Forward(self, attached.applications)
        with forward:
            result = run(self, *args, **kwargs)
        if forward.drawn:
            look_at_part(self, attached.roots, forward.drawn, result)
        return result

    @functools.wraps(forward)
    def forward_in_progress(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        attached = attached_to(self)
        if attached is None:
            return run(self, *args, **kwargs)
        attached.check(self)
        if not torch.compiler.is_compiling():
            return in_progress(self, attached, args, kwargs)
        if may_be_compiled and not attached.breaks:
            return forward_in_graph(run, self, attached.applications, args, kwargs)
        # With a recurrent layer within, the code around that layer is compiled, and the forward
        # is in force for all of it.
        return uncompiled(in_progress, recursive=not may_be_compiled)(self, attached, args, kwargs)

    return forward_in_progress


def _with_own_code(forward: Any, qualname: str) -> Any:
    """Return `forward` with a code object that no other class has (See Rule 4)."""
    forward.__code__ = forward.__code__.replace(co_qualname=qualname)
    return forward


def _slicing(base: type[nn.ParameterList]) -> Any:
    def get_item(self: nn.ParameterList, index: Any) -> Any:
        if isinstance(index, slice) and frames():
            # `ParameterList` would make new parameters of reparametrized weights.
            return [self[place] for place in range(*index.indices(len(self)))]
        get: Any = base.__getitem__
        return get(self, index)

    return get_item


def _reducing(base: type[nn.Module], names: tuple[str, ...]) -> Any:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        made, given, *rest = cast("Any", base.__reduce_ex__(self, protocol))
        is_ours = is_swapped(self) and given[:1] == (type(self),)
        return (_new, (base, names), *rest) if is_ours else (made, given, *rest)

    return reduce


def _new(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    return nn.Module.__new__(_class_for(base, names))


def _registering(base: type[nn.Module]) -> Any:
    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # It calls `hasattr`, which is no read of the weight.
        asking = Forward(self, ())
        asking.reads_raw = True
        with asking:
            base.register_parameter(self, name, param)

    return register


def _shown(base: type[nn.Module]) -> Any:
    def extra_repr(self: nn.Module) -> str:
        attached = attached_to(self)
        places: list[Place] = [] if attached is None else list(attached.places.values())
        parts = [f"{step!r} of {place.key}" for place in places for step in place.steps]
        return ", ".join(part for part in (base.extra_repr(self), *parts) if part)

    return extra_repr


def _loading(base: type[nn.Module]) -> Any:
    def load(self: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        attached = attached_to(self)
        for place in () if attached is None else attached.places.values():
            for step in place.steps:
                state_dict = step.complete(state_dict, prefix + place.key)
        base._load_from_state_dict(self, state_dict, prefix, *rest)

    return load
