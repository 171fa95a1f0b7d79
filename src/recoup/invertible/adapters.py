"""`adapt`: layers of zuko, nflows, normflows, FrEIA and torch.distributions, one class for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform

from recoup._arguments import shown
from recoup.invertible.chain import Chain
from recoup.invertible.closed_forms import (
    check_bijective,
    names_of,
    networks_of,
    parts_of,
    runs_as,
    undone,
    why_not,
    why_not_built,
    why_not_lazy,
)
from recoup.invertible.contract import Adapted, InvertibleModule

__all__ = ["Backwards", "adapt", "context_of"]


def adapt(transform: Any) -> InvertibleModule:
    """Return a layer of another library as an `InvertibleModule`, over the object itself.

    The layer stays as it is, with its parameters, names and state dict, and the library's own calls
    of it go on working. Data to latent is forward, whatever the library calls so.

    Layers with a closed inverse (couplings with affine and spline transforms, linear layers,
    permutations, ActNorm) are inverted in a `Chain` of constant memory, where backward pays a run
    of the layer's elementwise part and its inverse; networks of couplings run once in forward and
    once in backward. All others are recomputed, and keep their inputs: autoregressive layers (MAF,
    NSF of zuko), whose inverse takes a pass for each dimension, those that invert by a search or an
    integration, and layers of your own, which `print` of the result says with the reason. Derived
    classes count as layers of your own.

    Args:
        transform: one of

            * zuko's lazy transforms, which get the context of the chain;
            * nflows' transforms;
            * normflows' flows, of which `inverse` maps data to latent;
            * FrEIA's modules with one input; several conditions are one context, flattened and
              joined in their order; `SequenceINN`, and a `GraphINN` that is a sequence;
            * a bijective `torch.distributions.Transform`, whose parameters stay where they are;
            * an `InvertibleModule`, which is returned as it is.

            A composition becomes a `Chain` of its layers.

    Returns:
        The module. It has no copy of anything.

    Raises:
        ValueError: `transform` is none of these, is not bijective, or is a `GraphINN` that splits.

    Example:
        >>> import torch
        >>> from recoup.invertible import Chain, adapt
        >>> scale = torch.distributions.AffineTransform(0.0, torch.tensor([1.0, 2.0]), event_dim=1)
        >>> y, log_det = Chain(adapt(scale), memory="constant")(torch.ones(3, 2))
        >>> y[0].tolist(), round(log_det[0].item(), 4)
        ([1.0, 2.0], 0.6931)
    """
    if isinstance(transform, InvertibleModule):
        return transform
    own = runs_as(transform)
    if own == "FrEIA.framework.graph_inn.GraphINN":
        return Chain(*_adapted_nodes(transform))
    if own == "FrEIA.framework.sequence_inn.SequenceINN":
        return Chain(*_adapted_sequence(transform))
    parts = parts_of(transform)
    if parts:
        return Chain(*map(adapt, parts))
    if own == "torch.distributions.transforms._InverseTransform":
        return Backwards(adapt(transform.inv))  # itself, it has no copies
    for kind in names_of(transform):
        if kind in _ADAPTERS:
            return _ADAPTERS[kind](transform)
    raise ValueError(
        f"`transform` is {shown(transform)}, but must be a layer of zuko, nflows, normflows or "
        "FrEIA, a torch.distributions.Transform, or an InvertibleModule. For a whole flow use "
        "recoup.train_in; for a layer of your own derive from recoup.invertible.InvertibleModule."
    )


class Backwards(Adapted):
    """A layer from latent to data, for flows that are trained on their samples.

    Args:
        layer: the layer, which has its place in another chain.
    """

    def __init__(self, layer: InvertibleModule) -> None:
        networks: Sequence[nn.Module] = getattr(layer, "_networks", ())
        why_not = "" if layer.inverts_in_backward else "its inverse is an iteration"
        super().__init__(layer, networks, getattr(layer, "why_not", why_not))
        self.takes_context = layer.takes_context

    @property
    def has_started(self) -> bool:
        """Whether the layer has seen a batch in the mode that it is in."""
        return getattr(self.transform, "has_started", True)

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        return self.transform.inverse(x, *(() if context is None else (context,)))

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        return self.transform(y, *(() if context is None else (context,)))


class _OfTorch(Adapted):
    """A transform of torch.distributions, or one that zuko has built."""

    takes_context = False

    def __init__(self, transform: Transform) -> None:
        check_bijective(transform)
        if getattr(transform, "_cache_size", 0):
            raise ValueError(
                "`transform` keeps its last value (`cache_size` 1), which would be one that "
                "backward computes. Give `transform.with_cache(0)`."
            )
        super().__init__(transform, why_not=why_not_built(transform))

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        y = self.transform(x)
        return y, self.transform.log_abs_det_jacobian(x, y)

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        x = self._input_of(y, context)
        return x, -self.transform.log_abs_det_jacobian(x, y)

    def _input_of(self, y: Tensor, context: Tensor | None) -> Tensor:
        return undone(self.transform, y)


class _OfZuko(Adapted):
    """A lazy transform of zuko: it builds its transform in each call, from the context."""

    def __init__(self, transform: Any) -> None:
        super().__init__(transform, networks_of(transform), why_not_lazy(transform))

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        return self.transform(context).call_and_ladj(x)

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        built = self.transform(context)
        x = undone(built, y)
        return x, -built.log_abs_det_jacobian(x, y)

    def _input_of(self, y: Tensor, context: Tensor | None) -> Tensor:
        return undone(self.transform(context), y)


class _OfNflows(Adapted):
    """A transform of nflows."""

    def __init__(self, transform: Any) -> None:
        super().__init__(transform, networks_of(transform), why_not(transform))

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        return self.transform(x, context)

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        return self.transform.inverse(y, context)


class _OfNormflows(_OfNflows):
    """A flow of normflows, whose forward maps latent to data."""

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        if context is None:  # most have no such argument
            return self.transform.inverse(x)
        return self.transform.inverse(x, context=context)

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        return self.transform(y) if context is None else self.transform(y, context=context)


class _OfFrEIA(Adapted):
    """A module of FrEIA with one input and one output.

    Args:
        transform: the module.
        places: where its conditions are in the context; None for those that it has itself.
    """

    def __init__(self, transform: Any, places: Sequence[slice] | None = None) -> None:
        if len(transform.dims_in) != 1 or len(transform.output_dims(transform.dims_in)) != 1:
            raise ValueError(
                f"`transform` is a {type(transform).__name__}, which splits or joins, but a chain "
                "passes one tensor on. Use it outside of the chain."
            )
        if places is None:
            places = _places_of(transform.dims_c)
        self._places = list(zip(places, transform.dims_c, strict=True))
        super().__init__(transform, networks_of(transform), why_not(transform))
        self.takes_context = bool(self._places)

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        return self._run(x, context, rev=False)

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        return self._run(y, context, rev=True)

    def _run(self, x: Tensor, context: Tensor | None, *, rev: bool) -> tuple[Tensor, Any]:
        given: dict[str, Any] = {}
        if context is not None:
            flat = context.flatten(1)
            given = {"c": [flat[:, at].unflatten(1, tuple(dims)) for at, dims in self._places]}
        (y,), log_det = self.transform([x], rev=rev, jac=True, **given)
        return y, log_det


_ADAPTERS: dict[str, Callable[[Any], Adapted]] = {
    "torch.distributions.transforms.Transform": _OfTorch,
    "zuko.lazy.LazyTransform": _OfZuko,
    "nflows.transforms.base.Transform": _OfNflows,
    "normflows.flows.base.Flow": _OfNormflows,
    "FrEIA.modules.base.InvertibleModule": _OfFrEIA,
}


def _places_of(dims: Sequence[Sequence[int]]) -> list[slice]:
    """Return the places of conditions in a context of all, each flattened."""
    places: list[slice] = []
    start = 0
    for each in dims:
        places.append(slice(start, start + math.prod(each)))
        start = places[-1].stop
    return places


def _dims_of_conditions(whole: Any) -> dict[int, Sequence[int]]:
    """Return the shapes of the conditions of a `SequenceINN`, by their numbers."""
    pairs = zip(whole.module_list, whole.conditions, strict=True)
    dims = {at: module.dims_c[0] for module, at in pairs if at is not None}
    return {at: dims[at] for at in sorted(dims)}


def context_of(whole: Any, conditions: Any) -> Tensor | None:
    """Return the context of a network of FrEIA, for its conditions."""
    if conditions is None or len(conditions) == 0:
        return None
    if isinstance(conditions, Tensor):
        conditions = [conditions]
    if runs_as(whole) == "FrEIA.framework.sequence_inn.SequenceINN":
        conditions = [conditions[at] for at in _dims_of_conditions(whole)]
    return torch.cat([each.flatten(1) for each in conditions], 1) if conditions else None


def _adapted_sequence(whole: Any) -> Iterator[InvertibleModule]:
    """Adapt the modules of a `SequenceINN`; the context has its conditions by their numbers."""
    dims = _dims_of_conditions(whole)
    places = dict(zip(dims, _places_of(list(dims.values())), strict=True))
    for module, at in zip(whole.module_list, whole.conditions, strict=True):
        yield _OfFrEIA(module, () if at is None else (places[at],))


def _adapted_nodes(whole: Any) -> Iterator[InvertibleModule]:
    """Adapt the modules of a `GraphINN`, if each node receives the output of the one before."""
    places = _places_of([node.dims for node in whole.condition_nodes])
    ends = [*whole.in_nodes, *whole.out_nodes, *whole.condition_nodes]
    nodes = [node for node in whole.node_list if node not in ends]
    before = whole.in_nodes[:1]
    is_sequence = len(whole.in_nodes) == len(whole.out_nodes) == 1
    for node in nodes:
        is_sequence &= [given for given, _ in node.inputs] == before and len(node.outputs) == 1
        before = [node]
    if not is_sequence:
        raise ValueError(
            "`transform` is a GraphINN that splits or joins, but a chain passes one tensor on. "
            "Adapt the sequences in it, or build them as a SequenceINN."
        )
    place_of: dict[Any, slice] = dict(zip(whole.condition_nodes, places, strict=True))
    for node in nodes:
        yield _OfFrEIA(node.module, tuple(map(place_of.__getitem__, node.conditions)))
