"""`adapt`: layers of zuko, nflows, normflows, FrEIA and torch.distributions, one class for each.

A library is never imported (NOTE [ What is known of other libraries ]).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Transform

from recoup._arguments import shown
from recoup._core.modules import is_hooked
from recoup.invertible.chain import Chain
from recoup.invertible.contract import (
    Adapted,
    Backwards,
    InvertibleModule,
    names_of,
    runs_as,
)
from recoup.invertible.known_layers import (
    INVERSE,
    check_bijective,
    networks_of,
    parts_of,
    undone,
    why_not,
    why_not_built,
    why_not_lazy,
)


def adapt(transform: Any) -> InvertibleModule:
    """Return a layer of another library as an `InvertibleModule`, over the object itself.

    The layer stays as it is, with its parameters, names and state dict, and the library's own calls
    of it go on working. Data to latent is forward, whatever the library calls so.

    Layers with a closed inverse (couplings with affine and spline transforms, linear layers,
    permutations, ActNorm) are inverted in a `Chain` of constant memory, where backward pays a run
    of the layer's elementwise part and its inverse; networks of couplings run once in forward and
    once in backward. All others are recomputed, and keep their inputs: autoregressive layers (MAF,
    NSF of zuko), whose inverse takes a pass for each dimension, those that invert by a search or an
    integration, and layers of your own or of derived classes; `print` of the result says why.

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
        ValueError: `transform` is none of these, is not bijective, is a `GraphINN` that splits, or
            draws its number of terms from numpy (normflows' `Residual` without one). In forward,
            where a linear layer of nflows would use the matrix that it keeps in evaluation mode.

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
    layers = list(layers_of(transform)) if is_taken_apart(transform) else []
    if layers:
        return Chain(*layers)
    if runs_as(transform) == INVERSE:
        return Backwards(adapt(transform.inv))  # itself, it has no copies
    for kind in names_of(transform):
        if kind in _ADAPTERS:
            return _ADAPTERS[kind](transform)
    raise ValueError(
        f"`transform` is {shown(transform)}, but must be a layer of zuko, nflows, normflows or "
        "FrEIA, a torch.distributions.Transform, or an InvertibleModule. For a whole flow use "
        "recoup.train_in; for a layer of your own derive from recoup.invertible.InvertibleModule."
    )


def is_taken_apart(transform: Any) -> bool:
    """Whether a composition runs as its layers; one with hooks runs whole, but those of FrEIA."""
    return not is_hooked(transform) or runs_as(transform).startswith("FrEIA.")


def layers_of(whole: Any) -> Iterator[InvertibleModule]:
    """Return the layers of a composition as invertible modules; none for a layer."""
    own = runs_as(whole)
    if own == "FrEIA.framework.graph_inn.GraphINN":
        return _adapted_nodes(whole)
    if own == "FrEIA.framework.sequence_inn.SequenceINN":
        return _adapted_sequence(whole)
    return map(adapt, parts_of(whole))


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

    def _built(self, context: Tensor | None) -> Any:
        return self.transform

    def _run(self, x: Tensor, context: Tensor | None, *, back: bool) -> tuple[Tensor, Any]:
        built = self._built(context)
        if back:
            y = undone(built, x)
            return y, -built.log_abs_det_jacobian(y, x)
        y = built(x)
        return y, built.log_abs_det_jacobian(x, y)

    def _input_of(self, y: Tensor, context: Tensor | None) -> Tensor:
        return undone(self._built(context), y)


class _OfZuko(_OfTorch):
    """A lazy transform of zuko: it builds its transform in each call, from the context."""

    takes_context = True

    def __init__(self, transform: Any) -> None:
        Adapted.__init__(self, transform, networks_of(transform), why_not_lazy(transform))

    def _built(self, context: Tensor | None) -> Any:
        return self.transform(context)

    def _run(self, x: Tensor, context: Tensor | None, *, back: bool) -> tuple[Tensor, Any]:
        if back:
            return super()._run(x, context, back=True)
        return self.transform(context).call_and_ladj(x)


class _OfNflows(Adapted):
    """A transform of nflows."""

    def __init__(self, transform: Any) -> None:
        super().__init__(transform, networks_of(transform), why_not(transform))
        parts: Iterator[Any] = transform.modules()
        self._linear = tuple(part for part in parts if hasattr(part, "using_cache"))

    def _run(self, x: Tensor, context: Tensor | None, *, back: bool) -> tuple[Tensor, Any]:
        for part in self._linear if torch.is_grad_enabled() else ():
            if part.using_cache and not part.training:
                raise ValueError(
                    f"A {type(part).__name__} keeps its matrix in evaluation mode (`using_cache`), "
                    "and one that was kept without a graph has no gradient. Call its "
                    "`use_cache(False)`, evaluate under torch.no_grad(), or train the flow."
                )
        return self._called(x, context, back=back)

    def _called(self, x: Tensor, context: Tensor | None, *, back: bool) -> tuple[Tensor, Any]:
        return self.transform.inverse(x, context) if back else self.transform(x, context)


class _OfNormflows(_OfNflows):
    """A flow of normflows, whose forward maps latent to data."""

    def __init__(self, transform: Any) -> None:
        block = getattr(transform, "iresblock", None)
        if block is not None and block.n_power_series is None and not block.brute_force:
            raise ValueError(
                f"`transform` is a {type(transform).__name__} that draws its number of terms from "
                "numpy, so that a second run would be another one. Give it a number, "
                "`n_power_series`, or build the flow of recoup.invertible.InvertibleResidual."
            )
        super().__init__(transform)

    def _called(self, x: Tensor, context: Tensor | None, *, back: bool) -> tuple[Tensor, Any]:
        layer = self.transform if back else self.transform.inverse
        # Most have no such argument.
        return layer(x) if context is None else layer(x, context=context)


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
        places = _places_of(transform.dims_c) if places is None else places
        self._places = list(zip(places, transform.dims_c, strict=True))
        super().__init__(transform, networks_of(transform), why_not(transform))
        self.takes_context = bool(self._places)

    def _run(self, x: Tensor, context: Tensor | None, *, back: bool) -> tuple[Tensor, Any]:
        given: dict[str, Any] = {}
        if context is not None:
            flat = context.flatten(1)
            given = {"c": [flat[:, at].unflatten(1, tuple(dims)) for at, dims in self._places]}
        if back and hasattr(self.transform, "fac_rev"):  # it scales what it is given, in place
            x = x.clone()
        (y,), log_det = self.transform([x], rev=back, jac=True, **given)
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
    ends = [*accumulate(map(math.prod, dims), initial=0)]
    return list(map(slice, ends, ends[1:]))


def _dims_of_conditions(whole: Any) -> dict[int, Sequence[int]]:
    """Return the shapes of the conditions of a `SequenceINN`, by their numbers."""
    pairs = zip(whole.module_list, whole.conditions, strict=True)
    dims = {at: module.dims_c[0] for module, at in pairs if at is not None}
    return {at: dims[at] for at in sorted(dims)}


def conditions_of(whole: Any, conditions: Any) -> list[Tensor] | None:
    """Return the conditions of a network of FrEIA, as the context joins them; None if it cannot.

    Its own call takes such: they are too few or too many, of another size than it declares (which
    its layers may allow), or of several types, one of which would be rounded.
    """
    given: list[Tensor] = [conditions] if isinstance(conditions, Tensor) else [*(conditions or ())]
    if runs_as(whole) == "FrEIA.framework.sequence_inn.SequenceINN":
        declared = _dims_of_conditions(whole)
        given = [given[at] for at in declared if at < len(given)]
        dims = list(declared.values())
    else:
        dims = [node.dims for node in whole.condition_nodes]
    is_declared = [tuple(each.shape[1:]) for each in given] == [*map(tuple, dims)]
    return given if is_declared and len({each.dtype for each in given}) < 2 else None


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
