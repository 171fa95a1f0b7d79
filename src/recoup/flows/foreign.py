"""`train_in`: flows of other libraries, trained in constant memory by their own methods.

NOTE [ Flows of other libraries ]

Rule 1. A composition of layers gets callables in the place of its methods, on the instance; its
        class, modules, parameters and names stay. They run the layers as a chain where a graph is
        built, and are the library's own methods elsewhere.
Rule 2. The layers are looked at in each call: one that was added or replaced is in the chain.
Rule 3. The library's own code runs around the chains, so that what it does there stays: the base
        distribution, the split of several scales, the sum over conditions.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributions import Transform

from recoup._arguments import check_type
from recoup._core.drift_guard import Drift, DriftGuard
from recoup._core.saved_tensors import is_transformed
from recoup.invertible.adapters import adapt, conditions_of, is_taken_apart, layers_of, parts_of
from recoup.invertible.chain import Chain
from recoup.invertible.contract import Backwards, InvertibleModule, runs_as
from recoup.schedules.memory import Memory


def train_in(model: nn.Module, memory: Memory = "constant", *, drift: Drift = "recompute") -> Any:
    """Train flows of zuko, nflows, normflows and FrEIA in less memory, by their own methods.

    In place: each flow within `model` runs its layers as a `Chain` from now on, whenever a graph is
    built. ``flow(c).log_prob(x)`` of zuko, ``flow.log_prob(x, context)`` of nflows, ``log_prob``,
    ``forward_kld`` and ``reverse_kld`` of normflows, ``inn(x, c)`` of FrEIA and their ways from
    latents to data stay as they are; so do parameters, the names in the state dict, classes, and
    copies and pickles of the flow.

    Kept is what a `Chain` of this `memory` keeps: under "constant" its output, its input, and the
    inputs of layers that are recomputed, which a warning names: autoregressive ones (MAF and NSF of
    zuko), and those that `recoup.invertible.adapt` does not know. Backward pays the inverse and the
    elementwise part of each layer, and runs its networks once.

    Args:
        model: a flow, or any module that has flows within (a density estimator of sbi).
        memory: as for `recoup.invertible.Chain`; "linear" gives flows their own methods back.
        drift: as for `recoup.invertible.Chain`, for each flow.

    Returns:
        `model`.

    Raises:
        ValueError: there is no flow in `model`, its layers are not in sequence, or
            `recoup.invertible.adapt` refuses one.

    Example:
        >>> import torch
        >>> import recoup
        >>> try:
        ...     import zuko
        ... except ImportError:
        ...     zuko = None
        >>> if zuko is not None:
        ...     flow = recoup.train_in(zuko.flows.NICE(2, context=3, transforms=8))
        ...     loss = -flow(torch.ones(5, 3)).log_prob(torch.ones(5, 2)).mean()
        ...     loss.backward()
    """
    check_type(nn.Module, "an nn.Module", model=model)
    guard = DriftGuard.of(drift)
    found = dict.fromkeys(_compositions_in(model))
    if not found:
        raise ValueError(
            f"`model` is a {type(model).__name__}, in which there is no flow of zuko, nflows, "
            "normflows or FrEIA. For layers of your own use a recoup.invertible.Chain, for a "
            "distribution of torch its transforms and recoup.invertible.adapt, and for networks "
            "that are no flow recoup.plan. A flow of one transform alone (CNF) has no depth."
        )
    try:
        made = [(whole, _chains_for(whole, memory, guard)) for whole in found]
    except ValueError as error:  # the user has given `model`
        error.args = (str(error).replace("`transform` is", "`model` has", 1),)
        raise
    for whole, chains in made:
        kind = _KINDS[runs_as(whole)]
        for name in kind.names:
            if isinstance(vars(whole).get(name), _Method):
                del vars(whole)[name]
            own = getattr(whole, name, None)
            if memory == "linear" or own is None:
                continue
            is_replaced = name in vars(whole)
            if is_replaced or own.__module__.partition(".")[0] != runs_as(whole).partition(".")[0]:
                warnings.warn(
                    f"`{name}` of {type(whole).__name__} is its own, and of no library, so it "
                    "runs as it is; other methods of the flow that it calls run in less memory.",
                    stacklevel=2,
                )
                continue
            vars(whole)[name] = kind(whole, name, chains)
    return model


def chains_of(model: nn.Module) -> list[Chain]:
    """Return the chains that the flows of other libraries in a module run as, data to latents.

    Printed, each says which layers backward inverts and which it recomputes, and why; ``drift`` is
    its `recoup.invertible.DriftGuard`, with the errors of the inverses.

    Args:
        model: what was given to `recoup.train_in`.

    Example:
        >>> import torch
        >>> from recoup.flows import chains_of
        >>> chains_of(torch.nn.Linear(2, 2))
        []
    """
    check_type(nn.Module, "an nn.Module", model=model)
    chains: dict[Chain, None] = {}
    for whole in _compositions_in(model):
        for method in vars(whole).values():
            if isinstance(method, _Method):
                chains.update(dict.fromkeys(each.to_latent() for each in method.chains))
    return list(chains)


class _Chains:
    """The layers of one sequence as chains: from data to latent, and from latent to data."""

    def __init__(self, whole: nn.Module, memory: Memory, guard: DriftGuard) -> None:
        self._whole, self._memory, self._guard = whole, memory, guard
        self._leaves: list[Any] = []
        self._to_latent: Chain | None = None
        self._to_data: Chain | None = None
        self.ends: tuple[Any, Any] | None = None  # of a transform of zuko: domain and codomain
        self.to_latent()

    def to_latent(self) -> Chain:
        """Return the chain of the layers as they are now (See Rule 2)."""
        whole: Any = self._whole
        is_list = isinstance(whole, nn.ModuleList)  # of normflows, with the latent's layer first
        parts = list(whole)[::-1] if is_list else parts_of(whole)
        leaves = list(_leaves_of(parts))
        if self._to_latent is None or list(map(id, leaves)) != list(map(id, self._leaves)):
            layers = map(adapt, parts) if is_list else layers_of(whole)
            self._to_latent = Chain(*layers, memory=self._memory, drift=self._guard.anew())
            self._leaves, self._to_data, self.ends = leaves, None, None
        return self._to_latent

    def to_data(self) -> Chain:
        forth = self.to_latent()
        if self._to_data is None:
            layers = [Backwards(each) for each in _flat(forth)][::-1]
            self._to_data = Chain(*layers, memory=self._memory, drift=self._guard.anew())
        return self._to_data


class _Method:
    """A method of a composition, in whose place it is called (See Rule 1).

    Its layers are one sequence, or one for each scale.
    """

    names: tuple[str, ...] = ("forward",)
    run: Callable[..., Any]  # runs the layers as a chain

    def __init__(self, whole: nn.Module, name: str, chains: list[_Chains]) -> None:
        self.whole, self.name, self.chains = whole, name, chains

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layers as a chain, or the library's own method where no graph is built."""
        if not torch.is_grad_enabled() or is_transformed():
            return self.plain(*args, **kwargs)
        return self.run(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.whole), self.name)(self.whole, *args, **kwargs)


class _OfNflows(_Method):
    """`forward` or `inverse` of a composite transform of nflows."""

    names = ("forward", "inverse")

    def run(self, inputs: Tensor, context: Tensor | None = None) -> Any:
        chains = self.chains[0]
        chain = chains.to_latent() if self.name == "forward" else chains.to_data()
        return chain(inputs, context)


class _OfNormflows(_Method):
    """A method of a flow of normflows, which sees a flow of one layer (See Rule 3)."""

    names = (
        "forward", "inverse", "forward_and_log_det", "inverse_and_log_det", "log_prob", "sample",
        "forward_kld", "reverse_kld", "reverse_alpha_div",
    )  # fmt: skip

    def run(self, *args: Any, **kwargs: Any) -> Any:
        method = getattr(type(self.whole), self.name)
        given = inspect.signature(method).bind(self.whole, *args, **kwargs).arguments
        if given.get("score_fn") is False or given.get("dreg"):
            # They run the layers without gradients of parameters, and have these back in backward.
            return self.plain(*args, **kwargs)
        seen = copy.copy(self.whole)
        for name in self.names:
            vars(seen).pop(name, None)
        layers = [[_OneLayer(each)] for each in self.chains]
        vars(seen)["flows"] = layers if _is_multiscale(self.whole) else layers[0]
        return getattr(seen, self.name)(*args, **kwargs)


class _OneLayer:
    """A sequence of layers as one layer of normflows, whose forward maps latent to data."""

    def __init__(self, chains: _Chains) -> None:
        self._chains = chains

    def __call__(self, z: Tensor, context: Tensor | None = None) -> Any:
        return self._chains.to_data()(z, context)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Any:
        return self._chains.to_latent()(z, context)


class _OfFrEIA(_Method):
    """`forward` of a `SequenceINN`, or of a `GraphINN` that is a sequence."""

    def run(
        self, x_or_z: Any, c: Any = None, rev: bool = False, jac: bool = True, **other: Any
    ) -> Any:
        conditions = conditions_of(self.whole, c)
        if other or not jac or conditions is None:
            return self.plain(x_or_z, c, rev, jac, **other)
        chains = self.chains[0]
        chain = chains.to_data() if rev else chains.to_latent()
        x = x_or_z if isinstance(x_or_z, Tensor) else x_or_z[0]
        context = torch.cat([each.flatten(1) for each in conditions], 1) if conditions else None
        y, log_det = chain(x, context)
        whole: Any = self.whole
        return (y,) if whole.force_tuple_output else y, log_det


class _OfZuko(_Method):
    """`forward` of a composed lazy transform of zuko, which returns a transform."""

    def __call__(self, c: Tensor | None = None) -> Any:
        return _ChainedTransform(self, c)


class _ChainedTransform(Transform):
    """A composed transform of zuko whose layers run as a chain, under a context."""

    bijective = True

    def __init__(self, method: _OfZuko, context: Tensor | None, is_inverse: bool = False) -> None:
        super().__init__()
        self._method, self._context, self._is_inverse = method, context, is_inverse

    @property
    def domain(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._ends[self._is_inverse]

    @property
    def codomain(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._ends[not self._is_inverse]

    @property
    def _ends(self) -> tuple[Any, Any]:
        chains = self._method.chains[0]
        if chains.ends is None:  # of the layers, whatever the context
            with torch.no_grad():
                plain = self._method.plain(self._context)
            chains.ends = plain.domain, plain.codomain
        return chains.ends

    @property
    def plain(self) -> Any:
        plain = self._method.plain(self._context)
        return plain.inv if self._is_inverse else plain

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.plain, name)

    @property
    def inv(self) -> _ChainedTransform:
        return _ChainedTransform(self._method, self._context, is_inverse=not self._is_inverse)

    def call_and_ladj(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled() or is_transformed():
            return self.plain.call_and_ladj(x)
        chains = self._method.chains[0]
        chain = chains.to_data() if self._is_inverse else chains.to_latent()
        context = self._context
        num_batch: int = x.dim() - self.domain.event_dim
        batch, event = x.shape[:num_batch], x.shape[num_batch:]
        num_rows = 0 if context is None else context.dim() - num_batch  # dimensions of each row
        is_per_sample = num_batch > 0 and num_rows > 0
        if num_rows > 1 and context is not None:
            ends = zip(reversed(batch), reversed(context.shape[:-1]), strict=False)
            if all(1 in pair or pair[0] == pair[1] for pair in ends):
                return self.plain.call_and_ladj(x)  # rows of several dimensions, or batches
        if context is not None and is_per_sample and context.shape[:num_batch] == batch:
            context = context.reshape(batch.numel(), *context.shape[num_batch:])
        elif context is not None:
            batch = cast("torch.Size", torch.broadcast_shapes(batch, context.shape[:-1]))
            context = context.expand(*batch, -1).reshape(batch.numel(), -1)
        y, log_det = chain(x.expand(*batch, *event).reshape(batch.numel(), *event), context)
        return y.reshape(*batch, *y.shape[1:]), log_det.reshape(batch)

    def _call(self, x: Tensor) -> Tensor:
        return self.call_and_ladj(x)[0] if torch.is_grad_enabled() else self.plain(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return self.inv._call(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return self.call_and_ladj(x)[1]

    def forward_shape(self, shape: Any) -> Any:
        with torch.no_grad():
            return self.plain.forward_shape(shape)

    def inverse_shape(self, shape: Any) -> Any:
        with torch.no_grad():
            return self.plain.inverse_shape(shape)


_KINDS: dict[str, type[_Method]] = {
    "zuko.lazy.LazyComposedTransform": _OfZuko,
    "nflows.transforms.base.CompositeTransform": _OfNflows,
    "normflows.core.NormalizingFlow": _OfNormflows,
    "normflows.core.ConditionalNormalizingFlow": _OfNormflows,
    "normflows.core.ClassCondFlow": _OfNormflows,
    "normflows.core.MultiscaleFlow": _OfNormflows,
    "FrEIA.framework.sequence_inn.SequenceINN": _OfFrEIA,
    "FrEIA.framework.graph_inn.GraphINN": _OfFrEIA,
}


def _is_multiscale(whole: nn.Module) -> bool:
    return runs_as(whole) == "normflows.core.MultiscaleFlow"


def _compositions_in(module: nn.Module) -> Iterator[nn.Module]:
    if runs_as(module) in _KINDS:
        yield module
        return
    for child in module.children():
        yield from _compositions_in(child)


def _chains_for(whole: Any, memory: Memory, guard: DriftGuard) -> list[_Chains]:
    sequences = [whole]
    if _KINDS[runs_as(whole)] is _OfNormflows:
        sequences = list(whole.flows) if _is_multiscale(whole) else [whole.flows]
    return [_Chains(each, memory, guard) for each in sequences]


def _leaves_of(layers: list[Any]) -> Iterator[Any]:
    for each in layers:
        parts = parts_of(each) if is_taken_apart(each) else []
        yield from _leaves_of(parts) if parts else (each,)


def _flat(chain: Chain) -> Iterator[InvertibleModule]:
    for each in chain:
        yield from _flat(each) if isinstance(each, Chain) else (each,)
