"""Flows of other libraries, as their users build them, with one way to ask each for `log_prob`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

DIM, CONTEXT, BATCH = 4, 3, 8


class Built(NamedTuple):
    """A flow, and its log-probabilities of ``(x, context)``."""

    flow: nn.Module
    log_prob: Callable[[Any, Tensor, Tensor], Tensor]


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed")


def given(dtype: torch.dtype = torch.float64, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, context = torch.randn(batch, DIM, dtype=dtype), torch.randn(batch, CONTEXT, dtype=dtype)
    return x.requires_grad_(), context.requires_grad_()


# --- zuko ----------------------------------------------------------------------------------------


def of_zuko(flow: Any, x: Tensor, context: Tensor) -> Tensor:
    return flow(context).log_prob(x)


def zuko_affine(depth: int, width: int) -> Built:
    flows = library("zuko").flows
    options = {"hidden_features": (width, width), "activation": nn.SiLU}
    return Built(flows.RealNVP(DIM, CONTEXT, transforms=depth, **options), of_zuko)


def zuko_spline(depth: int, width: int) -> Built:
    zuko = library("zuko")
    from zuko.flows.coupling import GeneralCouplingTransform

    layers = []
    for index in range(depth):
        coupling = GeneralCouplingTransform(
            DIM, CONTEXT, mask=torch.arange(DIM) % 2 == index % 2,
            univariate=zuko.transforms.MonotonicRQSTransform, shapes=[(5,), (5,), (4,)],
            hidden_features=(width, width), activation=nn.SiLU,
        )  # fmt: skip
        rotation = zuko.transforms.RotationTransform
        layers += [coupling, zuko.flows.UnconditionalTransform(rotation, torch.randn(DIM, DIM))]
    return Built(zuko.flows.Flow(layers[:-1], zuko_affine(1, 4).flow.base), of_zuko)


def zuko_autoregressive(depth: int, width: int) -> Built:
    flows = library("zuko").flows
    return Built(flows.NSF(DIM, CONTEXT, transforms=depth, hidden_features=(width,)), of_zuko)


def zuko_two_passes(depth: int, width: int) -> Built:
    flows = library("zuko").flows
    options = {"passes": 2, "hidden_features": (width,), "activation": nn.SiLU}
    return Built(flows.MAF(DIM, CONTEXT, transforms=depth, **options), of_zuko)


# --- nflows --------------------------------------------------------------------------------------


def of_nflows(flow: Any, x: Tensor, context: Tensor) -> Tensor:
    return flow.log_prob(x, context)


def nflows_of(make: Callable[[Any, int, Any], list[Any]], depth: int, width: int) -> Built:
    transforms = library("nflows.transforms")
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow
    from nflows.nn.nets import ResidualNet

    def network(num_in: int, num_out: int) -> Any:
        return ResidualNet(
            num_in, num_out, hidden_features=width, context_features=CONTEXT, num_blocks=1,
            activation=nn.functional.silu, dropout_probability=0.2,
        )  # fmt: skip

    layers = [each for index in range(depth) for each in make(transforms, index, network)]
    return Built(Flow(transforms.CompositeTransform(layers), StandardNormal([DIM])), of_nflows)


def nflows_affine(depth: int, width: int) -> Built:
    def make(transforms: Any, index: int, network: Any) -> list[Any]:
        mask = torch.arange(DIM) % 2 == index % 2
        coupling = transforms.AffineCouplingTransform(mask, network)
        return [transforms.ActNorm(DIM), coupling, transforms.RandomPermutation(DIM)]

    return nflows_of(make, depth, width)


def nflows_spline(depth: int, width: int) -> Built:
    def make(transforms: Any, index: int, network: Any) -> list[Any]:
        coupling = transforms.PiecewiseRationalQuadraticCouplingTransform(
            torch.arange(DIM) % 2 == index % 2, network, num_bins=5, tails="linear",
            tail_bound=3.0, apply_unconditional_transform=True,
        )  # fmt: skip
        return [transforms.CompositeTransform([coupling, transforms.LULinear(DIM)])]

    return nflows_of(make, depth, width)


def nflows_batch_norm(depth: int, width: int) -> Built:
    def make(transforms: Any, index: int, network: Any) -> list[Any]:
        mask = torch.arange(DIM) % 2 == index % 2
        return [transforms.AdditiveCouplingTransform(mask, network), transforms.BatchNorm(DIM)]

    return nflows_of(make, depth, width)


def nflows_autoregressive(depth: int, width: int) -> Built:
    def make(transforms: Any, index: int, network: Any) -> list[Any]:
        of = transforms.MaskedAffineAutoregressiveTransform
        return [of(DIM, width, context_features=CONTEXT), transforms.ReversePermutation(DIM)]

    return nflows_of(make, depth, width)


# --- normflows -----------------------------------------------------------------------------------


def of_normflows(flow: Any, x: Tensor, context: Tensor) -> Tensor:
    return flow.log_prob(x) + 0 * context.sum()


def normflows_affine(depth: int, width: int) -> Built:
    normflows = library("normflows")
    layers = []
    for _ in range(depth):
        network = normflows.nets.MLP([DIM // 2, width, DIM], leaky=0.1, init_zeros=False)
        layers += [normflows.flows.AffineCouplingBlock(network), normflows.flows.ActNorm(DIM)]
        layers.append(normflows.flows.LULinearPermute(DIM))
    base = normflows.distributions.DiagGaussian(DIM)
    return Built(normflows.NormalizingFlow(base, layers), of_normflows)


class ConditionalBase(nn.Module):
    """A normal distribution whose mean is a function of the context."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(CONTEXT, DIM)

    def log_prob(self, z: Tensor, context: Tensor) -> Tensor:
        return -0.5 * (z - self.mean(context)).square().sum(1)


def normflows_spline(depth: int, width: int) -> Built:
    normflows = library("normflows")
    spline = normflows.flows.CoupledRationalQuadraticSpline
    layers = [
        spline(
            DIM, 1, width, num_context_channels=CONTEXT, num_bins=5, activation=nn.SiLU,
            reverse_mask=index % 2 == 1,
        )
        for index in range(depth)
    ]  # fmt: skip
    flow = normflows.ConditionalNormalizingFlow(ConditionalBase(), layers)
    return Built(flow, lambda flow, x, context: flow.log_prob(x, context))


def normflows_autoregressive(depth: int, width: int) -> Built:
    normflows = library("normflows")
    spline = normflows.flows.AutoregressiveRationalQuadraticSpline
    layers = [spline(DIM, 1, width, num_bins=5) for _ in range(depth)]
    base = normflows.distributions.DiagGaussian(DIM)
    return Built(normflows.NormalizingFlow(base, layers), of_normflows)


# --- FrEIA ---------------------------------------------------------------------------------------


def of_freia(flow: Any, x: Tensor, context: Tensor) -> Tensor:
    z, log_det = flow(x, c=[context])
    return log_det - 0.5 * z.square().sum(1)


def subnet(width: int) -> Callable[[int, int], nn.Module]:
    return lambda num_in, num_out: nn.Sequential(
        nn.Linear(num_in, width), nn.SiLU(), nn.Dropout(0.0), nn.Linear(width, num_out)
    )


def freia_sequence(depth: int, width: int) -> Built:
    framework, modules = library("FrEIA.framework"), library("FrEIA.modules")
    flow = framework.SequenceINN(DIM)
    for index in range(depth):
        kind = (modules.AllInOneBlock, modules.GLOWCouplingBlock)[index % 2]
        options = {"cond": 0, "cond_shape": (CONTEXT,)}
        flow.append(kind, subnet_constructor=subnet(width), **options)
        flow.append(modules.PermuteRandom, seed=index)
    return Built(flow, of_freia)


def freia_graph(depth: int, width: int) -> Built:
    framework, modules = library("FrEIA.framework"), library("FrEIA.modules")
    nodes, condition = [framework.InputNode(DIM)], framework.ConditionNode(CONTEXT)
    for _ in range(depth):
        options = {"subnet_constructor": subnet(width)}
        nodes.append(
            framework.Node(nodes[-1], modules.RNVPCouplingBlock, options, conditions=condition)
        )
        nodes.append(framework.Node(nodes[-1], modules.ActNorm, {}))
    return Built(framework.GraphINN([*nodes, condition, framework.OutputNode(nodes[-1])]), of_freia)


COUPLINGS: dict[str, Callable[[int, int], Built]] = {
    each.__name__: each
    for each in (
        zuko_affine, zuko_spline, nflows_affine, nflows_spline, normflows_affine, normflows_spline,
        freia_sequence, freia_graph,
    )
}  # fmt: skip
RECOMPUTED: dict[str, Callable[[int, int], Built]] = {
    each.__name__: each
    for each in (zuko_autoregressive, nflows_autoregressive, normflows_autoregressive)
}
FLOWS = COUPLINGS | RECOMPUTED | {
    "zuko_two_passes": zuko_two_passes, "nflows_batch_norm": nflows_batch_norm,
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
