"""Classes that stand in for the classes of modules with reparametrized weights.

NOTE [ A module changes its class and nothing else ]

Rule 1. The class is a subclass of the module's own, with the same name and signature, in which
        each reparametrized parameter is a property. In a forward it reads as the weight that the
        forward uses, and otherwise as the parameter itself, so that code that initialises, assigns,
        saves or steps sees the parameter. Parameters are never replaced or registered anew.
Rule 2. There is one such class for each class and set of names (NOTE [ A class on top of a module's
        own ]), and the state of one module is in its `__dict__`, and is copied and pickled with it.
Rule 3. torch runs a recurrent layer on a list of its weights. The list that a forward runs on has
        the reparametrized weights in the places of the raw ones, so the fused kernels are used.
        The list that the layer keeps has the parameters.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recoup._core.compile import (
    break_graph,
    never_compiled,
    not_compiled_itself,
    uncompiled,
)
from recoup._core.saved_tensors import is_transformed
from recoup._core.stand_ins import new_stand_in, with_stand_in, without_stand_in
from recoup.weights.compiled import NOT_IN_GRAPH, forward_in_graph, read_in_graph
from recoup.weights.forwards import Forward, frames
from recoup.weights.graph_operators import new_handle
from recoup.weights.parametrized_weight import ParametrizedWeight
from recoup.weights.reparametrization import Application, Drawn, Reparametrization

__all__ = ["Attached", "attach", "attached_to", "restore_class", "swap_class"]

_KEY = "_recoup_attached"


class Attached:
    """The state of a reparametrized module: its parameters, and the applications to its tree."""

    def __init__(self) -> None:
        self.weights: dict[str, ParametrizedWeight] = {}
        self.covered: list[Application] = []
        self.roots: list[Application] = []  # those that were applied to this module itself
        self.applications: tuple[Application, ...] = ()
        self.breaks = False  # whether a graph of its forward breaks at a layer
        self.draws = False  # whether anything in its tree is random
        self.draws_always = False  # whether that is so in evaluation, too
        self.handle = new_handle(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()
        self.__dict__.update(state)

    def check(self, module: nn.Module) -> None:
        """Raise if a parameter was removed, which would lose its reparametrizations."""
        parameters = module._parameters
        for key in self.weights:
            if key not in parameters and key not in module.__dict__:
                raise ValueError(
                    f"`{key}` of {type(module).__name__} is no longer a parameter of it (did "
                    "torch.nn.utils.parametrize replace it?), so the noise or norm that recoup "
                    "applied would be lost. Call recoup.weights.remove before you replace it."
                )

    def refresh(self) -> None:
        """Bring `applications` up to date: a forward of the module covers them."""
        own = [a for weight in self.weights.values() for a in weight.applications]
        self.applications = tuple(dict.fromkeys((*self.covered, *own)))


def attached_to(module: nn.Module) -> Attached | None:
    """Return the state that `module` carries, or None if nothing was applied to it."""
    return module.__dict__.get(_KEY)


def attach(module: nn.Module) -> Attached:
    """Return the state that `module` carries; give it an empty one if it has none."""
    return module.__dict__.setdefault(_KEY, Attached())


def swap_class(module: nn.Module) -> None:
    """Give `module` the class for the parameters that it carries."""
    attached = attach(module)
    attached.refresh()
    steps = [step for part in module.modules() for step in _steps_of(part)]
    attached.breaks = any(step.breaks_graph for step in steps) or any(
        isinstance(part, nn.RNNBase) for part in module.modules()
    )
    attached.draws = any(step.is_random for step in steps)
    attached.draws_always = any(step.is_random and step.mode == "always" for step in steps)
    module.__class__ = with_stand_in(type(module), _class_for, tuple(sorted(attached.weights)))


def _steps_of(part: nn.Module) -> list[Reparametrization]:
    attached = attached_to(part)
    weights = {} if attached is None else attached.weights
    return [step for each in weights.values() for step in each.steps]


def restore_class(module: nn.Module) -> None:
    """Give `module` its own class back, and delete the state that it carried."""
    del module.__dict__[_KEY]
    # If a wrapper's class is on top of ours, that stays, and passes calls on.
    module.__class__ = without_stand_in(type(module), _class_for)


def _class_for(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    return new_stand_in(base, _class_for, (names,), lambda: _members(base, names))


def _members(base: type[nn.Module], names: tuple[str, ...]) -> dict[str, Any]:
    members: dict[str, Any] = {name: _property(name) for name in names}
    is_recurrent = issubclass(base, nn.RNNBase)  # the compiler does not trace those either
    if is_recurrent:
        members |= _recurrent_members(base)
    if issubclass(base, nn.ParameterList):
        members["__getitem__"] = _slicing(base)
    run = _forward_by_rows if base.forward is nn.Embedding.forward else base.forward
    return members | {
        "forward": _forward_through(base.forward, run, may_be_compiled=not is_recurrent),
        "register_parameter": _registering(base),
        "extra_repr": _shown(base),
        "_load_from_state_dict": _loading(base),
    }


def _property(name: str) -> property:
    def read(module: nn.Module) -> Tensor | None:
        own = module.__dict__
        parameters = own.get("_parameters") or own
        if name not in parameters and name not in own:
            raise AttributeError(name)  # Python then calls `__getattr__`
        raw = parameters[name] if name in parameters else own[name]
        attached: Attached | None = own.get(_KEY)
        weight = None if attached is None else attached.weights.get(name)
        if weight is None or raw is None:
            return raw
        if torch.compiler.is_compiling():
            return read_in_graph(weight, module, raw)
        return weight.read(module, raw)

    def assign(module: nn.Module, value: Any) -> None:
        module.__dict__[name] = value  # a replica of DataParallel has tensors for parameters

    return property(read, assign)


def _forward_through(forward: Any, run: Any, *, may_be_compiled: bool) -> Any:
    @not_compiled_itself
    def in_progress(self: nn.Module, attached: Attached, args: Any, kwargs: Any) -> Any:
        forward = Forward(self, attached.applications, attached.roots)
        with forward:
            result = run(self, *args, **kwargs)
        if forward.steps or forward.joined:
            forward.wait_with(result)
        return result

    @functools.wraps(forward)
    def forward_in_progress(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        attached: Attached | None = self.__dict__.get(_KEY)
        if attached is None:
            return run(self, *args, **kwargs)
        attached.check(self)
        if not torch.compiler.is_compiling():
            return in_progress(self, attached, args, kwargs)
        if may_be_compiled and not attached.breaks:
            return forward_in_graph(run, self, attached, args, kwargs)
        break_graph(NOT_IN_GRAPH)
        # With a layer within that breaks the graph, the code around it is compiled, and the forward
        # is in force for all of it.
        return uncompiled(in_progress, recursive=not may_be_compiled)(self, attached, args, kwargs)

    return forward_in_progress


def _forward_by_rows(self: nn.Embedding, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run the forward of an embedding; draw for the rows that are looked up where that suffices.

    A custom forward may do more with the weight; it reads a weight that is drawn whole.
    """
    forward = nn.Embedding.forward
    top = _forward_of(self)
    attached = attached_to(self)
    weight = None if attached is None else attached.weights.get("weight")
    if top is None or weight is None or not _may_draw_rows(self, weight, input):
        return forward(self, input, *args, **kwargs)
    drawn = weight.drawn(self, cast("Tensor", self._parameters["weight"]))
    if not drawn:
        return forward(self, input, *args, **kwargs)
    top.reads_raw = True
    try:
        rows = forward(self, input, *args, **kwargs)
    finally:
        top.reads_raw = False
    return _apply_to_rows(rows, input, drawn)


@never_compiled
def _apply_to_rows(rows: Tensor, ids: Tensor, drawn: tuple[Drawn, ...]) -> Tensor:
    for each in drawn:
        rows = each.step.apply_to_rows(rows, ids, each)
    return rows


def _may_draw_rows(module: nn.Embedding, weight: ParametrizedWeight, ids: Any) -> bool:
    """Whether draws for the rows `ids` alone are fewer, and all that is applied to the weight."""
    if not all(step.draws_by_row for step in weight.steps) or is_transformed():
        return False
    raw = cast("Tensor", module._parameters["weight"])
    if is_traceable_wrapper_subclass(raw):
        return False  # reading it says what is missing
    # The same rows are shortened, in the table, however many are looked up.
    if module.max_norm is not None:
        return True
    num_columns = raw.shape[1]
    is_cheap = all(step.num_drawn_by_row(num_columns) == 1 for step in weight.steps)
    return is_cheap or (isinstance(ids, Tensor) and ids.numel() < raw.shape[0])


def _forward_of(module: nn.Module) -> Forward | None:
    """Return the innermost forward in progress, if it is one of `module`."""
    around = frames()
    top = around[-1] if around else None
    return top if isinstance(top, Forward) and top.owner is module else None


def _recurrent_members(base: type[nn.RNNBase]) -> dict[str, Any]:
    """Return members of a class for recurrent layers (See Rule 3)."""

    def weights(self: nn.RNNBase) -> list[Tensor]:
        top = _forward_of(self)
        if top is None or top.reads_raw:
            return self.__dict__["_flat_weights"]
        names: list[str] = self.__dict__["_flat_weights_names"]
        return [getattr(self, name) for name in names]

    def keep(self: nn.RNNBase, kept: list[Tensor]) -> None:
        self.__dict__["_flat_weights"] = kept

    def update(self: nn.RNNBase) -> None:
        top = _forward_of(self)
        if top is None:
            base._update_flat_weights(self)
            return
        # torch checks here that its list holds the layer's parameters: it must read the raw ones.
        top.reads_raw = True
        try:
            base._update_flat_weights(self)
        finally:
            top.reads_raw = False

    return {"_flat_weights": property(weights, keep), "_update_flat_weights": update}


def _slicing(base: type[nn.ParameterList]) -> Any:
    def get_item(self: nn.ParameterList, index: Any) -> Any:
        if isinstance(index, slice) and frames():
            # `ParameterList` would make new parameters of reparametrized weights.
            return [self[each] for each in range(*index.indices(len(self)))]
        get: Any = base.__getitem__
        return get(self, index)

    return get_item


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
        weights = () if attached is None else attached.weights.values()
        parts = [f"{step!r} of {weight.key}" for weight in weights for step in weight.steps]
        return ", ".join(part for part in (base.extra_repr(self), *parts) if part)

    return extra_repr


def _loading(base: type[nn.Module]) -> Any:
    def load(self: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        attached = attached_to(self)
        for weight in () if attached is None else attached.weights.values():
            for step in weight.steps:
                name = prefix + weight.key
                state_dict = step.complete(self, weight.key, state_dict, name)
        base._load_from_state_dict(self, state_dict, prefix, *rest)

    return load
