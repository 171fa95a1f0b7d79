"""Classes that stand in for the classes of modules with reparametrized weights.

NOTE [ A module changes its class and nothing else ]

Rule 1. The class is a subclass of the module's own, with the same name and signature, in which each
        reparametrized parameter is a property: a read of it computes (see `weight`). Parameters are
        never replaced or registered anew, so `parameters`, `state_dict` and `get_parameter` have
        them. Where a module is saved or loaded, a read is the parameter: some read it themselves.
Rule 2. There is one such class for each class and set of names (NOTE [ A class on top of a module's
        own ]), and the state of one module is in its `__dict__`, and is copied and pickled with it.
Rule 3. torch runs a recurrent layer on a list of its weights. The list that a forward runs on has
        the reparametrized weights in the places of the raw ones, so the fused kernels are used.
        The list that the layer keeps has the parameters.
Rule 4. A forward of the module that something was applied to is a step. The forwards of others are
        their own, but for recurrent layers, and for embeddings whose rows are dropped: that is done
        on the rows that were looked up, which is cheaper than to make a table.

NOTE [ One piece of memory ]

Rule 5. cuDNN runs a recurrent layer on one piece of memory with all of its weights. Those that were
        computed one by one it copies to such a piece in each forward, and autograd holds that: what
        nothing was to store would be stored. So they are copied here, to a piece that is made again
        in backward as any value is. The layer takes views of it, and cuDNN copies nothing.
Rule 6. Where each weight lies is what `flatten_parameters` of torch says. It leaves weights as they
        are where cuDNN does not run.
Rule 7. Nobody else sees the piece, so nothing changes it. Tensors that torch makes from its storage
        have versions of their own, which say nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled, not_compiled_itself
from recoup._core.devices import is_accelerator
from recoup._core.lazy_values import Source, as_value, keep
from recoup._core.modules import new_stand_in, with_stand_in, without_stand_in
from recoup._core.saved_tensors import Packed, is_transformed, pair_in_force, storage_id
from recoup._core.tensors import Cast
from recoup.errors import ReplayError
from recoup.weights.compiled import new_handle, read_in_graph, step_in_graph
from recoup.weights.reparametrization import Application, Step, local, running_on
from recoup.weights.weight import ParametrizedWeight, is_plain

_KEY = "_recoup_attached"
_BENEATH = "_recoup_beneath"


class Attached:
    """The state of a reparametrized module.

    `roots` are what was applied to it itself, for its own parameters or those within.
    """

    def __init__(self, weights: dict[str, ParametrizedWeight], roots: list[Application]) -> None:
        self.weights, self.roots = weights, roots
        self.handle = new_handle(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Attached, (self.weights, self.roots)

    def uses_in(self, module: nn.Module) -> Iterator[tuple[ParametrizedWeight, nn.Module]]:
        """Yield the weights for which its forward is a step, with the modules that have them."""
        for part in module.modules():
            for weight in weights_of(part).values():
                if any(step.application in self.roots for step in weight.steps):
                    yield weight, part


def attach(module: nn.Module) -> Attached:
    """Return the state that `module` carries; give it an empty one if it has none."""
    return module.__dict__.setdefault(_KEY, Attached({}, []))


def weights_of(module: nn.Module) -> dict[str, ParametrizedWeight]:
    """Return the reparametrized weights of one module, by their names in it."""
    attached: Attached | None = module.__dict__.get(_KEY)
    return {} if attached is None else attached.weights


def fit_class(module: nn.Module) -> None:
    """Give `module` the class for what it carries: its own again, where that is nothing."""
    if _KEY not in module.__dict__:
        return
    attached, parts = attach(module), list(module.modules())
    within = [weight for part in parts for weight in weights_of(part).values()]
    alive = {application for weight in within for application in weight.applications}
    attached.roots = [application for application in attached.roots if application in alive]
    if within:
        names = tuple(sorted(attached.weights))
        kind = with_stand_in(type(module), _class_for, names, bool(attached.roots))
    else:
        del module.__dict__[_KEY]
        # If a wrapper's class is on top of ours, that stays, and passes calls on.
        kind = without_stand_in(type(module), _class_for)
    object.__setattr__(module, "__class__", kind)  # a wrapper's would set it on what it wraps


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
    members |= {_BENEATH: base, "get_parameter": _get_parameter, "extra_repr": _raw(_extra_repr)}
    run = base.forward
    if names:
        members |= {
            "register_parameter": _registering(base.register_parameter),
            "_load_from_state_dict": _raw(base._load_from_state_dict),
            "state_dict": _raw(base.state_dict),
            "__delattr__": _delete,
        }
        if issubclass(base, nn.RNNBase):
            run = _on_computed_list(base.forward)
            members["_flat_weights"] = property(_list_of, _keep_list)
            for name in ("_init_flat_weights", "_update_flat_weights"):
                members[name] = _raw(getattr(base, name))
        elif base.forward is nn.Embedding.forward:
            run = _forward_by_rows
    if is_root or run is not base.forward:
        members["forward"] = _step_of(base.forward, run)
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
        # torch's own assignment has put a parameter in its place. Pruning and norms come here, with
        # a tensor for a parameter that they have deleted, and so do replicas of DataParallel.
        if name in weights_of(module) and "_is_replica" not in module.__dict__:
            raise _would_be_lost(module, name, "is to be replaced by a tensor (by pruning?)")
        module.__dict__[name] = value

    return property(read, assign)


# -- forwards ----------------------------------------------------------------------------------


def _step_of(forward: Any, run: Any) -> Any:
    """Return a forward that is a step where something was applied to the module itself."""

    @not_compiled_itself
    def in_step(self: nn.Module, attached: Attached, args: Any, kwargs: Any) -> Any:
        with Step(self, attached.roots):  # unnamed: an exception holds this frame
            return run(self, *args, **kwargs)

    @functools.wraps(forward)
    def forward_of_step(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        attached: Attached | None = self.__dict__.get(_KEY)
        if attached is None or not attached.roots:
            return run(self, *args, **kwargs)
        if not torch.compiler.is_compiling():
            return in_step(self, attached, args, kwargs)
        return step_in_graph(run, in_step, self, attached, args, kwargs)

    return forward_of_step


def _forward_by_rows(self: nn.Embedding, input: Any) -> Tensor:
    """Run the forward of an embedding; if whole rows are dropped, on those that are looked up."""
    raw: Any = self.__dict__.get("_parameters", {}).get("weight")
    weight = weights_of(self).get("weight")
    if (
        weight is None
        or raw is None
        or torch.compiler.is_compiling()
        or is_transformed()
        or not (is_plain(raw) and all(step.draws_by_row for step in weight.steps))
    ):
        return nn.Embedding.forward(self, input)
    drawn, rows = weight.drawn(self, raw), _raw(nn.Embedding.forward)(self, input)
    for each in drawn:
        rows = each.step.scaled_rows(rows, input, len(raw), each)
    return rows


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


def _on_computed_list(run: Any) -> Any:
    @never_compiled
    def forward(self: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        self._update_flat_weights()  # torch checks that its list holds the layer's parameters
        names: list[str] = self.__dict__["_flat_weights_names"]
        with running_on(self, _in_one_piece(self, [getattr(self, name) for name in names])):
            return run(self, *args, **kwargs)

    return forward


def _list_of(self: nn.RNNBase) -> list[Tensor]:
    found = local.lists.get(id(self))
    return self.__dict__["_flat_weights"] if found is None else found


def _keep_list(self: nn.RNNBase, kept: list[Tensor]) -> None:
    self.__dict__["_flat_weights"] = kept


def _in_one_piece(layer: nn.RNNBase, weights: list[Tensor]) -> list[Tensor]:
    """Return the weights of a layer in one piece if cuDNN runs it; else as they are."""
    is_computed = not all(isinstance(weight, nn.Parameter) for weight in weights)
    if not is_computed or not is_accelerator(weights[0].device) or is_transformed():
        return weights
    views = _laid_out(layer, weights)
    if len({storage_id(view) for view in views}) > 1:
        return weights
    views = list(cast("tuple[Tensor, ...]", _Laid.apply(views, *weights)))
    if torch.is_grad_enabled():
        piece = _Piece(layer, weights)
        views = [as_value(view, piece) for view in views]
    return views


def _laid_out(layer: nn.RNNBase, weights: list[Tensor]) -> list[Tensor]:
    """Return the weights without their graph, as views of one piece where cuDNN runs."""
    with torch._C.DisableTorchFunctionSubclass():
        views = [weight.data for weight in weights]  # with versions of their own
    with running_on(layer, views):
        nn.RNNBase.flatten_parameters(layer)  # which moves what is in the list
    return views


class _Laid(torch.autograd.Function):
    """Weights whose copies are given."""

    @staticmethod
    def forward(ctx: Any, views: list[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        del ctx, weights
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        del ctx
        return None, *gradients


class _Piece(Source):
    """The piece of memory, made from weights that are values, or are alive anyway."""

    def __init__(self, layer: nn.RNNBase, weights: list[Tensor]) -> None:
        super().__init__(f"The weights of a {type(layer).__name__}")
        self._layer = layer
        pair = pair_in_force()
        self._weights = [keep(weight, self.name, pair) for weight in weights]

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is of its type (See Rule 7)."""
        return tensor.dtype is self.dtype

    def slot(self, tensor: Tensor, cast: Cast | None = None) -> Packed:
        """Return what autograd saves in place of a view of the piece."""
        found = super().slot(tensor, cast)
        self._witness = None
        return found

    def make(self) -> None:
        """Lay the weights out again."""
        first, *others = _laid_out(self._layer, [each.get() for each in self._weights])
        if any(storage_id(each) != storage_id(first) for each in others):
            raise ReplayError(
                f"{self.name} were in one piece of memory in forward, as cuDNN wants them, and are "
                "not in backward. Leave torch.backends.cudnn as it was until backward has run."
            )
        self.give(first.new_empty(0).set_(first.untyped_storage()))


# -- what else a module does with its parameters -----------------------------------------------


def _beneath(module: nn.Module) -> Any:
    """Return the class beneath ours, whose methods ours extend."""
    return getattr(type(module), _BENEATH)


def _get_parameter(self: nn.Module, target: str) -> nn.Parameter:
    path, _, name = target.rpartition(".")
    owner = self.get_submodule(path)
    raw = owner._parameters[name] if name in weights_of(owner) else None
    return _beneath(self).get_parameter(self, target) if raw is None else raw


def _registering(register: Any) -> Any:
    raw = _raw(register)  # it calls `hasattr`: no read

    @functools.wraps(register)
    def registering(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        weight = weights_of(self).get(name)
        is_normed = weight is not None and any(not step.is_random for step in weight.steps)
        if is_normed and local.raw_of is not self:  # which is where a state is loaded
            raise _would_be_lost(self, name, "is to be replaced, and would be divided by its norm")
        raw(self, name, param)

    return registering


def _delete(self: nn.Module, name: str) -> None:
    if name in weights_of(self):
        raise _would_be_lost(self, name, "is to be deleted (by a parametrization of torch?)")
    _beneath(self).__delattr__(self, name)


def _would_be_lost(module: nn.Module, name: str, what: str) -> ValueError:
    return ValueError(
        f"`{name}` of {type(module).__name__} {what}, so the noise or norm that recoup applied "
        "would be lost. Call recoup.weights.remove before you replace it."
    )


def _extra_repr(self: nn.Module) -> str:
    steps = [f"{step!r} of {w.key}" for w in weights_of(self).values() for step in w.steps]
    return ", ".join(part for part in (_beneath(self).extra_repr(self), *steps) if part)
