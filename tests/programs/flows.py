"""Flows of other libraries, as their users build them, with one way to ask each for `log_prob`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

DIM, CONTEXT, BATCH = 4, 3, 8


class Built(NamedTuple):
    flow: nn.Module
    log_prob: Callable[[Any, Tensor, Tensor], Tensor]


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed")


def given(dtype: torch.dtype = torch.float64, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, context = torch.randn(batch, DIM, dtype=dtype), torch.randn(batch, CONTEXT, dtype=dtype)
    return x.requires_grad_(), context.requires_grad_()


def evens(index: int) -> Tensor:
    return torch.arange(DIM) % 2 == index % 2


def of_zuko(flow, x, context):
    return flow(context).log_prob(x)


def of_nflows(flow, x, context):
    return flow.log_prob(x, context)


def of_normflows(flow, x, context):
    return flow.log_prob(x) + 0 * context.sum()


def of_freia(flow, x, context):
    z, log_det = flow(x, c=[context])
    return log_det - 0.5 * z.square().sum(1)


def zuko_of(kind: str, depth: int, width: int, *, layers: int = 1, **options: Any) -> Built:
    options |= {"hidden_features": (width,) * layers, "transforms": depth}
    return Built(getattr(library("zuko").flows, kind)(DIM, CONTEXT, **options), of_zuko)


zuko_affine = partial(zuko_of, "RealNVP", layers=2, activation=nn.SiLU)


def zuko_spline(depth: int, width: int) -> Built:
    zuko = library("zuko")
    from zuko.flows.coupling import GeneralCouplingTransform

    layers, rotation = [], zuko.transforms.RotationTransform
    options = {"univariate": zuko.transforms.MonotonicRQSTransform, "activation": nn.SiLU}
    options |= {"shapes": [(5,), (5,), (4,)], "hidden_features": (width, width)}
    for index in range(depth):
        layers.append(GeneralCouplingTransform(DIM, CONTEXT, mask=evens(index), **options))
        layers.append(zuko.flows.UnconditionalTransform(rotation, torch.randn(DIM, DIM)))
    return Built(zuko.flows.Flow(layers[:-1], zuko_affine(1, 4).flow.base), of_zuko)


def nflows_of(make, depth, width):
    transforms = library("nflows.transforms")
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow
    from nflows.nn.nets import ResidualNet

    options = {"context_features": CONTEXT, "num_blocks": 1, "dropout_probability": 0.2}
    options |= {"hidden_features": width, "activation": nn.functional.silu}
    network = partial(ResidualNet, **options)
    layers = [each for k in range(depth) for each in make(transforms, evens(k), network, width)]
    return Built(Flow(transforms.CompositeTransform(layers), StandardNormal([DIM])), of_nflows)


def rational_quadratic(t, mask, network, width):
    options = {"num_bins": 5, "tails": "linear", "tail_bound": 3.0}
    options["apply_unconditional_transform"] = True
    coupling = t.PiecewiseRationalQuadraticCouplingTransform(mask, network, **options)
    return [t.CompositeTransform([coupling, t.LULinear(DIM)])]


NFLOWS = {
    "affine": lambda t, mask, network, width: [
        t.ActNorm(DIM), t.AffineCouplingTransform(mask, network), t.RandomPermutation(DIM)
    ],
    "spline": rational_quadratic,
    "batch_norm": lambda t, mask, network, width: [
        t.AdditiveCouplingTransform(mask, network), t.BatchNorm(DIM)
    ],
    "autoregressive": lambda t, mask, network, width: [
        t.MaskedAffineAutoregressiveTransform(DIM, width, context_features=CONTEXT),
        t.ReversePermutation(DIM),
    ],
}  # fmt: skip


class ConditionalBase(nn.Linear):
    def log_prob(self, z, context):
        return -0.5 * (z - self(context)).square().sum(1)


def normflows_affine(depth: int, width: int) -> Built:
    library("normflows")
    from normflows import NormalizingFlow, distributions, flows, nets

    layers = []
    for _ in range(depth):
        network = nets.MLP([DIM // 2, width, DIM], leaky=0.1, init_zeros=False)
        coupling = flows.AffineCouplingBlock(network)
        layers += [coupling, flows.ActNorm(DIM), flows.LULinearPermute(DIM)]
    return Built(NormalizingFlow(distributions.DiagGaussian(DIM), layers), of_normflows)


def normflows_spline(depth: int, width: int) -> Built:
    normflows = library("normflows")
    options = {"num_context_channels": CONTEXT, "num_bins": 5, "activation": nn.SiLU}
    spline = partial(normflows.flows.CoupledRationalQuadraticSpline, DIM, 1, width, **options)
    layers = [spline(reverse_mask=index % 2 == 1) for index in range(depth)]
    return Built(
        normflows.ConditionalNormalizingFlow(ConditionalBase(CONTEXT, DIM), layers), of_nflows
    )


def normflows_autoregressive(depth: int, width: int) -> Built:
    normflows = library("normflows")
    spline = normflows.flows.AutoregressiveRationalQuadraticSpline
    layers = [spline(DIM, 1, width, num_bins=5) for _ in range(depth)]
    base = normflows.distributions.DiagGaussian(DIM)
    return Built(normflows.NormalizingFlow(base, layers), of_normflows)


def subnet(num_in, num_out, width):
    parts = nn.Linear(num_in, width), nn.SiLU(), nn.Dropout(0.0), nn.Linear(width, num_out)
    return nn.Sequential(*parts)


def freia_sequence(depth: int, width: int) -> Built:
    framework, modules = library("FrEIA.framework"), library("FrEIA.modules")
    flow = framework.SequenceINN(DIM)
    options = {"cond": 0, "cond_shape": (CONTEXT,)}
    for index in range(depth):
        kind = (modules.AllInOneBlock, modules.GLOWCouplingBlock)[index % 2]
        flow.append(kind, subnet_constructor=partial(subnet, width=width), **options)
        flow.append(modules.PermuteRandom, seed=index)
    return Built(flow, of_freia)


def freia_graph(depth: int, width: int) -> Built:
    framework, modules = library("FrEIA.framework"), library("FrEIA.modules")
    nodes, condition = [framework.InputNode(DIM)], framework.ConditionNode(CONTEXT)
    options = {"subnet_constructor": partial(subnet, width=width)}
    for _ in range(depth):
        coupling = modules.RNVPCouplingBlock
        nodes.append(framework.Node(nodes[-1], coupling, options, conditions=condition))
        nodes.append(framework.Node(nodes[-1], modules.ActNorm, {}))
    return Built(framework.GraphINN([*nodes, condition, framework.OutputNode(nodes[-1])]), of_freia)


COUPLINGS = {
    "zuko_affine": zuko_affine, "zuko_spline": zuko_spline,
    "nflows_affine": partial(nflows_of, NFLOWS["affine"]),
    "nflows_spline": partial(nflows_of, NFLOWS["spline"]),
    "normflows_affine": normflows_affine, "normflows_spline": normflows_spline,
    "freia_sequence": freia_sequence, "freia_graph": freia_graph,
}  # fmt: skip
RECOMPUTED = {
    "zuko_autoregressive": partial(zuko_of, "NSF"),
    "nflows_autoregressive": partial(nflows_of, NFLOWS["autoregressive"]),
    "normflows_autoregressive": normflows_autoregressive,
}
FLOWS = COUPLINGS | RECOMPUTED | {
    "zuko_two_passes": partial(zuko_of, "MAF", passes=2, activation=nn.SiLU),
    "nflows_batch_norm": partial(nflows_of, NFLOWS["batch_norm"]),
}  # fmt: skip


def build(
    name: str, depth: int = 3, width: int = 8, dtype: torch.dtype = torch.float64, std: float = 0.2
) -> Built:
    """A flow off the start of its networks, some of which are zeros; `std` 0 leaves them there."""
    torch.manual_seed(0)
    np.random.seed(0)  # of which FrEIA draws permutations
    built = FLOWS[name](depth, width)
    for parameter in built.flow.parameters():
        if std and parameter.requires_grad and not parameter.any():
            torch.nn.init.normal_(parameter, std=std)
    return Built(built.flow.to(dtype), built.log_prob)
