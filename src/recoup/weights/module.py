"""Classes that stand in for the classes of modules with reparametrized weights.

NOTE [ A module changes its class and nothing else ]

Rule 1. The class is a subclass of the module's own, with the same name and signature, in which each
        reparametrized parameter is a property: a read of it computes (see `weight`). Parameters are
        never replaced or registered anew, so `parameters`, `state_dict` and `get_parameter` have
        them.
Rule 2. There is one such class for each class and set of names (NOTE [ A class on top of a module's
        own ]), and the state of one module is in its `__dict__`, and is copied and pickled with it.
Rule 3. torch runs a recurrent layer on a list of its weights. The list that a forward runs on has
        the reparametrized weights in the places of the raw ones, so the fused kernels are used.
        The list that the layer keeps has the parameters.
Rule 4. A forward of the module that something was applied to is a step. The forwards of others are
        their own, but for recurrent layers and for embeddings, whose rows may be drawn alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled, not_compiled_itself
from recoup._core.saved_tensors import is_transformed
from recoup._core.stand_ins import new_stand_in, with_stand_in, without_stand_in
from recoup.weights.compiled import new_handle, read_in_graph, step_in_graph
from recoup.weights.reparametrization import Application
from recoup.weights.steps import Step, leave, local
from recoup.weights.weight import ParametrizedWeight, is_plain

__all__ = [
    "Attached",
    "attach",
    "attached_to",
    "check_is_plain",
    "restore_class",
    "swap_class",
    "weights_of",
]

_KEY = "_recoup_attached"


class Attached:
    """The state of a reparametrized module.

    Attributes:
        weights: its own parameters that are reparametrized.
        roots: what was applied to this module itself, for its own parameters or those within.
        weights_within: the parameters for which its forward is a step.
    """

    def __init__(self) -> None:
        self.weights: dict[str, ParametrizedWeight] = {}
        self.roots: list[Application] = []
        self.weights_within: list[ParametrizedWeight] = []
        self.handle = new_handle(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()
        self.__dict__.update(state)

    def uses_in(self, module: nn.Module) -> Iterator[tuple[ParametrizedWeight, nn.Module]]:
        """Yield `weights_within`, with the modules that have them."""
        for part in module.modules():
            attached = attached_to(part)
            for weight in () if attached is None else attached.weights.values():
                if any(step.application in self.roots for step in weight.steps):
                    yield weight, part


def attached_to(module: nn.Module) -> Attached | None:
    """Return the state that `module` carries, or None if nothing was applied to it."""
    return module.__dict__.get(_KEY)


def attach(module: nn.Module) -> Attached:
    """Return the state that `module` carries; give it an empty one if it has none."""
    return module.__dict__.setdefault(_KEY, Attached())


def swap_class(module: nn.Module) -> None:
    """Give `module` the class for what it carries."""
    attached = attach(module)
    attached.weights_within = [weight for weight, _ in attached.uses_in(module)]
    names = tuple(sorted(attached.weights))
    module.__class__ = with_stand_in(type(module), _class_for, names, bool(attached.roots))


def weights_of(part: nn.Module) -> Iterator[ParametrizedWeight]:
    """Yield the reparametrized weights of one module."""
    attached = attached_to(part)
    yield from () if attached is None else attached.weights.values()


def restore_class(module: nn.Module) -> None:
    """Give `module` its own class back, and delete the state that it carried."""
    del module.__dict__[_KEY]
    # If a wrapper's class is on top of ours, that stays, and passes calls on.
    module.__class__ = without_stand_in(type(module), _class_for)


def check_is_plain(weight: Tensor, name: str) -> None:
    """Raise if this rank has a part of a weight, and nothing will gather the whole."""
    if not is_plain(weight):
        raise ValueError(
            f"`{name}` is a {type(weight).__name__}, of which this rank has a part (tensor "
            "parallelism, FSDP2), and a draw is one of the whole weight. Leave it out; or call "
            "this before fully_shard, which gathers weights for their forward."
        )


def _class_for(base: type[nn.Module], names: tuple[str, ...], is_root: bool) -> type[nn.Module]:
    return new_stand_in(base, _class_for, (names, is_root), lambda: _members(base, names, is_root))


def _members(base: type[nn.Module], names: tuple[str, ...], is_root: bool) -> dict[str, Any]:
    members: dict[str, Any] = {name: _property(name) for name in names}
    members |= {"get_parameter": _getting(base), "extra_repr": _shown(base)}
    run = base.forward
    if names:
        members |= {
            "register_parameter": _registering(base),
            "_load_from_state_dict": _loading(base),
            "__delattr__": _deleting(base),
            "qconfig": property(_no_qconfig, _quantizing),
        }
        if issubclass(base, nn.RNNBase):
            run = _running(base)
            members["_flat_weights"] = property(_list_of, _keep_list)
            for name in ("_init_flat_weights", "_update_flat_weights"):
                members[name] = _raw(getattr(base, name))
        elif base.forward is nn.Embedding.forward:
            run = _forward_by_rows
    if is_root:
        members["forward"] = _step_of(base.forward, run)
    elif run is not base.forward:
        members["forward"] = functools.wraps(base.forward)(_with_own_code(run))
    return members


def _property(name: str) -> property:
    def read(module: nn.Module) -> Tensor | None:
        own = module.__dict__
        parameters = own.get("_parameters") or own
        if name not in parameters and name not in own:
            raise AttributeError(name)  # Python then calls `__getattr__`
        raw = parameters[name] if name in parameters else own[name]
        attached: Attached | None = own.get(_KEY)
        weight = None if attached is None else attached.weights.get(name)
        if weight is None or raw is None or local.raw_of is module:
            return raw
        if torch.compiler.is_compiling():
            return read_in_graph(weight, module, raw)
        return weight.read(module, raw)

    def assign(module: nn.Module, value: Any) -> None:
        module.__dict__[name] = value  # a replica of DataParallel has tensors for parameters

    return property(read, assign)


# -- forwards ----------------------------------------------------------------------------------


def _step_of(forward: Any, run: Any) -> Any:
    """Return a forward that is a step."""

    @not_compiled_itself
    def in_step(self: nn.Module, attached: Attached, args: Any, kwargs: Any) -> Any:
        step = Step(self, attached.roots)
        frames = local.frames
        frames.append(step)
        try:
            return run(self, *args, **kwargs)
        finally:
            if frames[-1] is step:
                frames.pop()
            else:
                leave(step)
            step.made, step.last = {}, None  # an exception may hold this frame

    @functools.wraps(forward)
    def forward_of_step(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        attached: Attached | None = self.__dict__.get(_KEY)
        if attached is None:
            return run(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            return in_step(self, attached, args, kwargs)
        return step_in_graph(run, in_step, self, attached, args, kwargs)

    return forward_of_step


def _with_own_code(run: Any) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    return forward


def _forward_by_rows(self: nn.Embedding, input: Tensor) -> Tensor:
    """Run the forward of an embedding; draw for the rows that are looked up where that suffices."""
    raw: Any = self.__dict__.get("_parameters", {}).get("weight")
    attached = attached_to(self)
    weight = None if attached is None else attached.weights.get("weight")
    if weight is None or raw is None or not _may_draw_rows(self, weight.steps, raw, input):
        return nn.Embedding.forward(self, input)
    return _rows(self, weight, raw, input)


@never_compiled
def _rows(module: Any, weight: ParametrizedWeight, raw: Tensor, ids: Tensor) -> Tensor:
    drawn, rows = weight.drawn(module, raw), _raw(nn.Embedding.forward)(module, ids)
    for each in drawn:
        rows = each.step.apply_to_rows(rows, ids, each)
    return rows


def _may_draw_rows(module: nn.Embedding, steps: list[Any], raw: Tensor, ids: Any) -> bool:
    """Whether draws for the rows `ids` alone are fewer, and all that is applied to the weight."""
    if torch.compiler.is_compiling() or is_transformed() or not is_plain(raw):
        return False
    # The same rows are shortened, in the table, however many are looked up.
    is_cheap = module.max_norm is not None or all(step.draws_rows_whole for step in steps)
    is_few = isinstance(ids, Tensor) and ids.numel() < raw.shape[0]
    return all(step.draws_by_row for step in steps) and (is_cheap or is_few)


def _raw(run: Any) -> Any:
    """Return a method within which the parameters of its module are read as they are."""

    @functools.wraps(run)
    @never_compiled
    def reading_raw(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before, local.raw_of = local.raw_of, self
        try:
            return run(self, *args, **kwargs)
        finally:
            local.raw_of = before

    return reading_raw


# -- recurrent layers (See Rule 3) -------------------------------------------------------------


def _running(base: type[nn.RNNBase]) -> Any:
    run: Any = base.forward

    @never_compiled
    def forward(self: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        self._update_flat_weights()  # torch checks that its list holds the layer's parameters
        names: list[str] = self.__dict__["_flat_weights_names"]
        before = local.lists.get(id(self))
        local.lists[id(self)] = [getattr(self, name) for name in names]
        try:
            return run(self, *args, **kwargs)
        finally:
            del local.lists[id(self)]
            if before is not None:
                local.lists[id(self)] = before

    return forward


def _list_of(self: nn.RNNBase) -> list[Tensor]:
    found = local.lists.get(id(self))
    return self.__dict__["_flat_weights"] if found is None else found


def _keep_list(self: nn.RNNBase, kept: list[Tensor]) -> None:
    self.__dict__["_flat_weights"] = kept


# -- what else a module does with its parameters -----------------------------------------------


def _getting(base: type[nn.Module]) -> Any:
    def get_parameter(self: nn.Module, target: str) -> nn.Parameter:
        path, _, name = target.rpartition(".")
        owner = self.get_submodule(path)
        attached = attached_to(owner)
        raw = None if attached is None or name not in attached.weights else owner._parameters[name]
        return base.get_parameter(self, target) if raw is None else raw

    return get_parameter


def _registering(base: type[nn.Module]) -> Any:
    register_raw = _raw(base.register_parameter)  # it calls `hasattr`, which is no read

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        attached = attached_to(self)
        is_ours = attached is not None and name in attached.weights
        # A recurrent layer is given its parts by FSDP2 in this way.
        if param is not None and is_ours and not isinstance(self, nn.RNNBase):
            before = self._parameters.get(name)
            if before is None or type(before) is nn.Parameter:
                check_is_plain(param, name)
        register_raw(self, name, param)

    return register


def _deleting(base: type[nn.Module]) -> Any:
    def delete(self: nn.Module, name: str) -> None:
        attached = attached_to(self)
        if attached is not None and name in attached.weights:
            raise ValueError(
                f"`{name}` of {type(self).__name__} is to be deleted (by a parametrization of "
                "torch?), so the noise or norm that recoup applied would be lost. Call "
                "recoup.weights.remove before you replace it."
            )
        base.__delattr__(self, name)

    return delete


def _no_qconfig(module: nn.Module) -> None:
    raise AttributeError("qconfig")


def _quantizing(module: nn.Module, qconfig: object) -> None:
    raise ValueError(
        f"A {type(module).__name__} has reparametrized weights, and torch.ao.quantization, which "
        "looks for layers by their types, would leave it as it is. Call recoup.weights.remove "
        "first, or quantize a twin without noise: recoup.weights.twin(model)."
    )


def _shown(base: type[nn.Module]) -> Any:
    def extra_repr(self: nn.Module) -> str:
        parts = [f"{step!r} of {each.key}" for each in weights_of(self) for step in each.steps]
        return ", ".join(part for part in (base.extra_repr(self), *parts) if part)

    return extra_repr


def _loading(base: type[nn.Module]) -> Any:
    def load(self: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for weight in weights_of(self):
            name = prefix + weight.key
            for step in weight.steps if name in state_dict else ():
                added = prefix + step.added(weight.key)
                value = None
                if added != prefix and added not in state_dict:
                    value = step.complete(self, weight.key, state_dict[name])
                if value is not None:
                    state_dict = {**state_dict, added: value}
        base._load_from_state_dict(self, state_dict, prefix, *rest)

    return load
