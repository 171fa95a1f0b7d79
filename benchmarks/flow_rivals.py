"""The same RealNVP and the same small Glow in every library that trains such flows.

Each is written in its library's own way, down to the base distribution; what a library cannot say
as the others do stands in `DIFFERENCES`. All but zuko, which makes its own, get the same networks.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recoup.flows import Flow
from recoup.invertible import (
    ActNorm,
    AffineCoupling,
    Chain,
    InvertibleConv1x1,
    InvertibleConv1x1LU,
    Split,
    Squeeze,
)

NUM_COUPLINGS, UNITS = 8, 64
IMAGES, WIDTH = (16, 3, 16, 16), 32
LOG_2_PI = 1.8378770664093453
DIFFERENCES = {
    ("moons", "nflows"): "scales are a sigmoid, not bounded by a tanh",
    ("moons", "normflows"): "scales are an exp without a bound; swaps the halves between couplings",
    ("moons", "FrEIA"): "four blocks of two couplings; the base is written by hand, as in its docs",
    ("moons", "zuko"): "scales are bounded by a quotient, not a tanh",
    ("glow", "recoup linear, LU"): "1x1 convolutions in LU factors",
    ("glow", "nflows"): "1x1 convolutions in LU factors; scales are a sigmoid",
    ("glow", "normflows"): "scales are an exp without a bound",
    ("glow", "normflows, LU"): "1x1 convolutions in LU factors; scales are a sigmoid",
    ("glow", "FrEIA"): "1x1 convolutions are products of as many learned reflections as channels",
    ("glow", "FrEIA, fixed rotations"): "1x1 convolutions are fixed: less is learned",
    ("glow", "recoup linear, fixed rotations"): "1x1 convolutions are fixed: less is learned",
}


class Contestant(NamedTuple):
    module: nn.Module
    log_prob: Callable[[Tensor], Tensor]
    sample: Callable[[int], Tensor]


# --- networks, the same in all libraries ---------------------------------------------------------


def dense(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_inputs, UNITS),
        nn.ReLU(),
        nn.Linear(UNITS, UNITS),
        nn.ReLU(),
        nn.Linear(UNITS, num_outputs),
    )


def convolutions(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_inputs, WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, WIDTH, 1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, num_outputs, 3, padding=1),
    )


class TakesContext(nn.Sequential):
    """A network for nflows, which passes a context, here None."""

    def forward(self, x, context=None):
        return super().forward(x)


# --- RealNVP on points ---------------------------------------------------------------------------


def recoup_moons(memory: str, in_pairs: bool = False) -> Contestant:
    if in_pairs:
        couplings = [AffineCoupling(dense(1, 2), dense(1, 2)) for _ in range(NUM_COUPLINGS // 2)]
    else:
        couplings = [
            AffineCoupling(dense(1, 2), condition="first" if index % 2 == 0 else "second")
            for index in range(NUM_COUPLINGS)
        ]
    return _of_recoup(Chain(*couplings, memory=memory), (2,))


def _of_recoup(chain: Chain, shape: tuple[int, ...]) -> Contestant:
    flow = Flow(chain, shape=shape)
    return Contestant(flow, flow.log_prob, flow.sample)


def nflows_moons() -> Contestant:
    from nflows import transforms

    couplings = [
        transforms.AffineCouplingTransform(
            [index % 2, 1 - index % 2], lambda *sizes: TakesContext(*dense(*sizes))
        )
        for index in range(NUM_COUPLINGS)
    ]
    return _of_nflows(transforms.CompositeTransform(couplings), (2,))


def _of_nflows(transform: nn.Module, shape: tuple[int, ...]) -> Contestant:
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow as Library

    flow = Library(transform, StandardNormal(shape))
    return Contestant(flow, flow.log_prob, flow.sample)


def normflows_moons() -> Contestant:
    import normflows as library

    flows = []
    for _ in range(NUM_COUPLINGS):
        flows += [library.flows.AffineCouplingBlock(dense(1, 2))]
        flows += [library.flows.Permute(2, mode="swap")]
    base = library.distributions.DiagGaussian(2, trainable=False)
    flow = library.NormalizingFlow(base, flows)
    return Contestant(flow, flow.log_prob, lambda n: flow.sample(n)[0])


def freia_moons() -> Contestant:
    from FrEIA import framework, modules

    flow = framework.SequenceINN(2)
    for _ in range(NUM_COUPLINGS // 2):
        flow.append(
            modules.GLOWCouplingBlock,
            subnet_constructor=dense,
            clamp=2.0,
            clamp_activation="TANH",
        )

    def log_prob(x):
        z, log_det = flow(x)
        return log_det - 0.5 * z.square().sum(1) - LOG_2_PI

    def sample(n):
        return flow(torch.randn(n, 2), rev=True, jac=False)[0]

    return Contestant(flow, log_prob, sample)


def zuko_moons() -> Contestant:
    from zuko.flows import RealNVP

    flow = RealNVP(2, transforms=NUM_COUPLINGS, hidden_features=(UNITS, UNITS))
    return Contestant(flow, lambda x: flow().log_prob(x), lambda n: flow().sample((n,)))


MOONS = {
    "recoup linear": partial(recoup_moons, "linear"),
    "recoup constant": partial(recoup_moons, "constant"),
    "recoup linear, pairs": partial(recoup_moons, "linear", in_pairs=True),
    "recoup constant, pairs": partial(recoup_moons, "constant", in_pairs=True),
    "nflows": nflows_moons,
    "normflows": normflows_moons,
    "FrEIA": freia_moons,
    "zuko": zuko_moons,
}


# --- Glow on images ------------------------------------------------------------------------------


def scales() -> list[tuple[int, int, int]]:
    """Return channels, height and width of each of two scales, after its squeeze."""
    _, c, h, w = IMAGES
    return [(4 * c, h // 2, w // 2), (8 * c, h // 4, w // 4)]


def recoup_glow(memory: str, mix: Callable, num_steps: int) -> Contestant:
    stages = []
    for c, _, _ in scales():
        stages += [Split()] if stages else []
        stages += [Squeeze()]
        for _ in range(num_steps):
            stages += [ActNorm(c), mix(c), AffineCoupling(convolutions(c // 2, c))]
    return _of_recoup(Chain(*stages, memory=memory), IMAGES[1:])


def fixed_rotation(num_channels: int) -> InvertibleConv1x1:
    return InvertibleConv1x1(num_channels).requires_grad_(requires_grad=False)


def nflows_glow(num_steps: int) -> Contestant:
    from nflows import transforms

    whole = transforms.MultiscaleCompositeTransform(2)
    for shape in scales():
        c = shape[0]
        mask = [0] * (c // 2) + [1] * (c // 2)
        steps = [transforms.SqueezeTransform()]
        for _ in range(num_steps):
            steps += [
                transforms.ActNorm(c),
                # With its cache, which serves evaluation.
                transforms.OneByOneConvolution(c, using_cache=True),
                transforms.AffineCouplingTransform(
                    mask, lambda *sizes: TakesContext(*convolutions(*sizes))
                ),
            ]
        whole.add_transform(transforms.CompositeTransform(steps), shape)
    num_values = IMAGES[1] * IMAGES[2] * IMAGES[3]
    return _of_nflows(whole, (num_values,))


def normflows_glow(use_lu: bool, scale_map: str, num_steps: int) -> Contestant:
    import normflows as library

    bases, flows, merges = [], [], []
    for index, (c, h, w) in enumerate(reversed(scales())):
        steps = [
            library.flows.GlowBlock(c, WIDTH, scale_map=scale_map, init_zeros=False, use_lu=use_lu)
            for _ in range(num_steps)
        ]
        flows.append([*steps, library.flows.Squeeze()])
        merges += [library.flows.Merge()] if index else []
        # Of what is split off, half of the channels.
        shape = (c // 2 if index else c, h, w)
        bases.append(library.distributions.DiagGaussian(shape, trainable=False))
    flow = library.MultiscaleFlow(bases, flows, merges, class_cond=False)
    return Contestant(flow, lambda x: flow.log_prob(x, None), lambda n: flow.sample(n)[0])


def freia_glow(mixing: Callable[[int], dict], num_steps: int) -> Contestant:
    from FrEIA import framework, modules

    nodes = [framework.InputNode(*IMAGES[1:])]
    ends = []
    for index in range(2):
        source = (nodes[-1], 0)
        nodes.append(framework.Node(source, modules.IRevNetDownsampling, {}))
        for _ in range(num_steps):
            nodes.append(
                framework.Node(
                    nodes[-1],
                    modules.AllInOneBlock,
                    {
                        "subnet_constructor": convolutions,
                        "global_affine_type": "EXP",
                        **mixing(nodes[-1].output_dims[0][0]),
                    },
                )
            )
        if index == 0:
            split = framework.Node(nodes[-1], modules.Split, {})
            ends.append(framework.OutputNode((split, 1)))
            nodes.append(split)
    ends.append(framework.OutputNode(nodes[-1]))
    flow = framework.GraphINN([*nodes, *ends])
    (c, h, w), last = scales()
    shapes = [(c // 2, h, w), last]
    num_values = IMAGES[1] * IMAGES[2] * IMAGES[3]

    def log_prob(x):
        latents, log_det = flow(x)
        squares = sum(z.square().flatten(1).sum(1) for z in latents)
        return log_det - 0.5 * squares - 0.5 * num_values * LOG_2_PI

    def sample(n):
        return flow([torch.randn(n, *shape) for shape in shapes], rev=True, jac=False)[0]

    return Contestant(flow, log_prob, sample)


GLOWS = {
    "recoup linear": partial(recoup_glow, "linear", InvertibleConv1x1),
    "recoup linear, LU": partial(recoup_glow, "linear", InvertibleConv1x1LU),
    "recoup linear, fixed rotations": partial(recoup_glow, "linear", fixed_rotation),
    "recoup sqrt": partial(recoup_glow, "sqrt", InvertibleConv1x1),
    "recoup constant": partial(recoup_glow, "constant", InvertibleConv1x1),
    "nflows": nflows_glow,
    "normflows": partial(normflows_glow, False, "exp"),
    "normflows, LU": partial(normflows_glow, True, "sigmoid"),
    "FrEIA": partial(freia_glow, lambda c: {"learned_householder_permutation": c}),
    "FrEIA, fixed rotations": partial(freia_glow, lambda c: {"permute_soft": True}),
}
