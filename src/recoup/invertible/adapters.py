"""`adapt`: layers of zuko, nflows, normflows, FrEIA and torch.distributions, one class for each.

NOTE [ What is known of other libraries ]

Rule 1. A library is never imported: an object of one shows by its classes, by the names of the
        modules that define them.
Rule 2. `_CLOSED` has the classes whose inverses are closed forms, as cheap as forward and nearly
        as exact. Layers of all other classes are recomputed: autoregressive ones, whose inverse
        runs once for each dimension, those that search or integrate, those that saturate, and all
        that are not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform

from recoup._arguments import shown
from recoup._core.modules import is_hooked
from recoup.invertible.chain import Chain
from recoup.invertible.contract import Adapted, Backwards, InvertibleModule, names_of, runs_as


def adapt(transform: Any) -> InvertibleModule:
    """Return a layer of another library as an `InvertibleModule`, over the object itself.

    The layer stays as it is, with its parameters, names and state dict, and the library's own calls
    of it go on working. Data to latent is forward, whatever the library calls so.

    Layers with a closed inverse (couplings with affine and spline transforms, linear layers,
    permutations, ActNorm) are inverted in a `Chain` of constant memory, where backward pays a run
    of the layer's elementwise part and its inverse; networks of couplings run once in forward and
    once in backward. All others are recomputed, and keep their inputs: autoregressive layers (MAF,
    NSF of zuko), those that invert by a search or an integration, and layers of your own or of
    derived classes; `print` of the result says why.

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
    if runs_as(transform) == _INVERSE:
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
        _check_bijective(transform)
        if getattr(transform, "_cache_size", 0):
            raise ValueError(
                "`transform` keeps its last value (`cache_size` 1), which would be one that "
                "backward computes. Give `transform.with_cache(0)`."
            )
        super().__init__(transform, why_not=_why_not_built(transform))

    def _built(self, context: Tensor | None) -> Any:
        return self.transform

    def _run(self, x: Tensor, context: Tensor | None, *, back: bool) -> tuple[Tensor, Any]:
        built = self._built(context)
        if back:
            y = _undone(built, x)
            return y, -built.log_abs_det_jacobian(y, x)
        y = built(x)
        return y, built.log_abs_det_jacobian(x, y)

    def _input_of(self, y: Tensor, context: Tensor | None) -> Tensor:
        return _undone(self._built(context), y)


class _OfZuko(_OfTorch):
    """A lazy transform of zuko: it builds its transform in each call, from the context."""

    takes_context = True

    def __init__(self, transform: Any) -> None:
        Adapted.__init__(self, transform, _networks_of(transform), _why_not_lazy(transform))

    def _built(self, context: Tensor | None) -> Any:
        return self.transform(context)

    def _run(self, x: Tensor, context: Tensor | None, *, back: bool) -> tuple[Tensor, Any]:
        if back:
            return super()._run(x, context, back=True)
        return self.transform(context).call_and_ladj(x)


class _OfNflows(Adapted):
    """A transform of nflows."""

    def __init__(self, transform: Any) -> None:
        super().__init__(transform, _networks_of(transform), _why_not(transform))
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

    `places` are where its conditions are in the context; None for those that it has itself.
    """

    def __init__(self, transform: Any, places: Sequence[slice] | None = None) -> None:
        if len(transform.dims_in) != 1 or len(transform.output_dims(transform.dims_in)) != 1:
            raise ValueError(
                f"`transform` is a {type(transform).__name__}, which splits or joins, but a chain "
                "passes one tensor on. Use it outside of the chain."
            )
        places = _places_of(transform.dims_c) if places is None else places
        self._places = list(zip(places, transform.dims_c, strict=True))
        super().__init__(transform, _networks_of(transform), _why_not(transform))
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

    They are then too few or too many, of another size than it declares (which its layers may
    allow), or of several types, one of which would be rounded: its own call takes them.
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


# -- what is known of other libraries --------------------------------------------------------------

# By the modules that define them.
_CLOSED = {
    "torch.distributions.transforms": "AffineTransform ExpTransform ReshapeTransform",
    "zuko.transforms": "IdentityTransform CircularShiftTransform AdditiveTransform "
    "MonotonicAffineTransform MonotonicRQSTransform PermutationTransform RotationTransform "
    "LULinearTransform",
    "nflows.transforms.coupling": "AffineCouplingTransform AdditiveCouplingTransform "
    "PiecewiseLinearCouplingTransform PiecewiseQuadraticCouplingTransform "
    "PiecewiseRationalQuadraticCouplingTransform",
    "nflows.transforms.conv": "OneByOneConvolution",
    "nflows.transforms.linear": "NaiveLinear",
    "nflows.transforms.lu": "LULinear",
    "nflows.transforms.qr": "QRLinear",
    "nflows.transforms.svd": "SVDLinear",
    "nflows.transforms.orthogonal": "HouseholderSequence",
    "nflows.transforms.normalization": "ActNorm",
    "nflows.transforms.nonlinearities": "LeakyReLU PiecewiseRationalQuadraticCDF",
    "nflows.transforms.permutations": "Permutation RandomPermutation ReversePermutation",
    "nflows.transforms.reshape": "SqueezeTransform",
    "nflows.transforms.standard": "IdentityTransform PointwiseAffineTransform AffineTransform",
    "normflows.flows.affine.coupling": "AffineConstFlow AffineCouplingBlock MaskedAffineFlow",
    "normflows.flows.mixing": "Permute Invertible1x1Conv InvertibleAffine LULinearPermute",
    "normflows.flows.neural_spline.wrapper": "CoupledRationalQuadraticSpline "
    "CircularCoupledRationalQuadraticSpline",
    "normflows.flows.normalization": "ActNorm",
    "normflows.flows.periodic": "PeriodicShift",
    "normflows.flows.reshape": "Squeeze",
    "FrEIA.modules.all_in_one_block": "AllInOneBlock",
    "FrEIA.modules.coupling_layers": "NICECouplingBlock RNVPCouplingBlock GLOWCouplingBlock "
    "GINCouplingBlock AffineCouplingOneSided ConditionalAffineTransform",
    "FrEIA.modules.fixed_transforms": "PermuteRandom FixedLinearTransform Fixed1x1Conv",
    "FrEIA.modules.invertible_resnet": "ActNorm",
    "FrEIA.modules.orthogonal": "HouseholderPerm",
    # Without Haar's wavelets: the way back changes what it is given, in place.
    "FrEIA.modules.reshapes": "IRevNetDownsampling IRevNetUpsampling Flatten Reshape",
}

# Where the couplings of a module have networks that both directions call once, on the same input.
_NETWORKS = {
    "zuko.flows.coupling": "hyper",
    "nflows.transforms.coupling": "transform_net",
    "normflows.flows.affine.coupling": "param_map s t",
    "normflows.flows.neural_spline.coupling": "transform_net",
    "FrEIA.modules.all_in_one_block": "subnet",
    "FrEIA.modules.coupling_layers": "F G subnet subnet1 subnet2 "
    "subnet_s1 subnet_t1 subnet_s2 subnet_t2",
}

# Where compositions have their layers, data to latent, by the classes that define how they run.
_PARTS: dict[str, Callable[[Any], Sequence[Any]]] = {
    "torch.distributions.transforms.ComposeTransform": lambda whole: whole.parts,
    "zuko.transforms.ComposedTransform": lambda whole: whole.transforms,
    "zuko.lazy.LazyComposedTransform": lambda whole: whole.transforms,
    "nflows.transforms.base.CompositeTransform": lambda whole: whole._transforms,
    "normflows.flows.base.Composite": lambda whole: whole._flows[::-1],
    "normflows.flows.affine.glow.GlowBlock": lambda whole: whole.flows[::-1],
    "FrEIA.framework.sequence_inn.SequenceINN": lambda whole: whole.module_list,
    "FrEIA.framework.graph_inn.GraphINN": lambda whole: whole.module_list,
}

_INVERSE = "torch.distributions.transforms._InverseTransform"

# What transforms around one other have it in.
_WRAPPERS = {
    _INVERSE: "_inv",
    "torch.distributions.transforms.IndependentTransform": "base_transform",
    "zuko.transforms.DependentTransform": "base",
}

_UNKNOWN = "its inverse is not known to be cheap and exact"


def parts_of(transform: Any) -> list[Any]:
    """Return the layers of a composition, data to latent; none for a layer."""
    of = _PARTS.get(runs_as(transform))
    return [] if of is None else list(of(transform))


def _networks_of(transform: nn.Module) -> Iterator[nn.Module]:
    """Yield the networks of the couplings in a layer."""
    for owner in transform.modules():
        names = _NETWORKS.get(type(owner).__module__, "").split()
        yield from (child for name, child in owner.named_children() if name in names)


def _is_closed(transform: object) -> bool:
    return type(transform).__qualname__ in _CLOSED.get(type(transform).__module__, "").split()


def _why_not(transform: Any) -> str:
    """Return why a layer of nflows, normflows or FrEIA is recomputed; "" if it is inverted."""
    if _is_closed(transform):
        return ""
    is_sequential = any("utoregressive" in name for name in names_of(transform))
    return "its inverse runs once for each dimension" if is_sequential else _UNKNOWN


def _why_not_built(transform: Any) -> str:
    """Return why a transform that is built is recomputed; "" if it is inverted."""
    if _is_closed(transform):
        return ""
    kind = names_of(transform)[0]
    if kind in _WRAPPERS:
        return _why_not_built(getattr(transform, _WRAPPERS[kind]))
    if kind not in _PARTS:
        return _UNKNOWN
    reasons = [_why_not_built(each) for each in parts_of(transform)]
    return next((each for each in reasons if each), "")


def _why_not_lazy(transform: Any) -> str:
    """Return why a lazy transform of zuko is recomputed; "" if it is inverted."""
    kind = names_of(transform)[0]
    if kind == "zuko.lazy.LazyInverse":
        return _why_not_lazy(transform.transform)
    if kind == "zuko.lazy.UnconditionalTransform":
        with torch.no_grad():
            built = transform()
        _check_bijective(built)
        return _why_not_built(built)
    if kind == "zuko.flows.autoregressive.MaskedAutoregressiveTransform" and transform.passes > 2:
        return f"its inverse runs {transform.passes} times, once for each dimension"
    if kind in (
        "zuko.flows.autoregressive.MaskedAutoregressiveTransform",
        "zuko.flows.coupling.GeneralCouplingTransform",
        "zuko.flows.gaussianization.ElementWiseTransform",
    ):
        like: Tensor = next(transform.parameters())
        return _why_not_built(transform.univariate(*map(like.new_zeros, transform.shapes)))
    return _UNKNOWN


def _undone(transform: Any, y: Tensor) -> Tensor:
    """Return what a transform maps to `y`, without `inv`.

    A transform and its `inv` hold each other, and the tensors in them, until garbage is collected.
    """
    kind = names_of(transform)[0]
    if kind == _INVERSE:
        return transform._inv(y)
    if kind in _WRAPPERS:
        return _undone(getattr(transform, _WRAPPERS[kind]), y)
    if kind == "zuko.transforms.CouplingTransform":
        given, changed = transform.split(y)
        return transform.merge(given, _undone(transform.meta(given), changed), y.shape)
    if kind == "zuko.transforms.AutoregressiveTransform":
        x = torch.zeros_like(y)
        for _ in range(transform.passes):
            x = _undone(transform.meta(x), y)
        return x
    parts = parts_of(transform)
    for part in reversed(parts):
        y = _undone(part, y)
    return y if parts else transform._inverse(y)


def _check_bijective(transform: Transform) -> None:
    """Raise ValueError if a transform has no inverse."""
    if not transform.bijective:
        raise ValueError(
            f"`transform` is {shown(transform)}, which is not bijective, so that there is no "
            "density to follow through it. Leave it out of the chain."
        )
