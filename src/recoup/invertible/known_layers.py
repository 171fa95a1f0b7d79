"""What is known of the layers of other libraries: their parts, their networks and their inverses.

NOTE [ What is known of other libraries ]

Rule 1. A library is never imported: an object of one shows by its classes, by the names of the
        modules that define them.
Rule 2. `_CLOSED` has the classes whose inverses are closed forms, as cheap as forward and nearly
        as exact. Layers of all other classes are recomputed: autoregressive ones, whose inverse
        runs once for each dimension, those that search or integrate, those that saturate, and all
        that are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform

from recoup._arguments import shown
from recoup.invertible.contract import names_of, runs_as

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

# What compositions have their layers in, in the order from data to latent, by the classes that
# define how they run.
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

INVERSE = "torch.distributions.transforms._InverseTransform"

# What transforms around one other have it in.
_WRAPPERS = {
    INVERSE: "_inv",
    "torch.distributions.transforms.IndependentTransform": "base_transform",
    "zuko.transforms.DependentTransform": "base",
}

_UNKNOWN = "its inverse is not known to be cheap and exact"
_SEQUENTIAL = "its inverse runs once for each dimension"


def parts_of(transform: Any) -> list[Any]:
    """Return the layers of a composition, data to latent; none for a layer."""
    of = _PARTS.get(runs_as(transform))
    return [] if of is None else list(of(transform))


def networks_of(transform: nn.Module) -> Iterator[nn.Module]:
    """Yield the networks of the couplings in a layer."""
    for owner in transform.modules():
        names = _NETWORKS.get(type(owner).__module__, "").split()
        yield from (child for name, child in owner.named_children() if name in names)


def _is_closed(transform: object) -> bool:
    return type(transform).__qualname__ in _CLOSED.get(type(transform).__module__, "").split()


def why_not(transform: Any) -> str:
    """Return why a layer of nflows, normflows or FrEIA is recomputed; "" if it is inverted."""
    if _is_closed(transform):
        return ""
    return _SEQUENTIAL if any("utoregressive" in n for n in names_of(transform)) else _UNKNOWN


def why_not_built(transform: Any) -> str:
    """Return why a transform that is built is recomputed; "" if it is inverted."""
    if _is_closed(transform):
        return ""
    kind = names_of(transform)[0]
    if kind in _WRAPPERS:
        return why_not_built(getattr(transform, _WRAPPERS[kind]))
    if kind not in _PARTS:
        return _UNKNOWN
    reasons = [why_not_built(each) for each in parts_of(transform)]
    return next((each for each in reasons if each), "")


def why_not_lazy(transform: Any) -> str:
    """Return why a lazy transform of zuko is recomputed; "" if it is inverted."""
    kind = names_of(transform)[0]
    if kind == "zuko.lazy.LazyInverse":
        return why_not_lazy(transform.transform)
    if kind == "zuko.lazy.UnconditionalTransform":
        with torch.no_grad():
            built = transform()
        check_bijective(built)
        return why_not_built(built)
    if kind == "zuko.flows.autoregressive.MaskedAutoregressiveTransform" and transform.passes > 2:
        return f"its inverse runs {transform.passes} times, once for each dimension"
    if kind in (
        "zuko.flows.autoregressive.MaskedAutoregressiveTransform",
        "zuko.flows.coupling.GeneralCouplingTransform",
        "zuko.flows.gaussianization.ElementWiseTransform",
    ):
        like: Tensor = next(transform.parameters())
        return why_not_built(transform.univariate(*map(like.new_zeros, transform.shapes)))
    return _UNKNOWN


def undone(transform: Any, y: Tensor) -> Tensor:
    """Return what a transform maps to `y`, without `inv`.

    A transform and its `inv` hold each other, and the tensors in them, until garbage is collected.
    """
    kind = names_of(transform)[0]
    if kind == INVERSE:
        return transform._inv(y)
    if kind in _WRAPPERS:
        return undone(getattr(transform, _WRAPPERS[kind]), y)
    if kind == "zuko.transforms.CouplingTransform":
        given, changed = transform.split(y)
        return transform.merge(given, undone(transform.meta(given), changed), y.shape)
    if kind == "zuko.transforms.AutoregressiveTransform":
        x = torch.zeros_like(y)
        for _ in range(transform.passes):
            x = undone(transform.meta(x), y)
        return x
    parts = parts_of(transform)
    for part in reversed(parts):
        y = undone(part, y)
    return y if parts else transform._inverse(y)


def check_bijective(transform: Transform) -> None:
    """Raise ValueError if a transform has no inverse."""
    if not transform.bijective:
        raise ValueError(
            f"`transform` is {shown(transform)}, which is not bijective, so that there is no "
            "density to follow through it. Leave it out of the chain."
        )
