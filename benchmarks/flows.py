"""A RealNVP on points and a small Glow on images, in every library that trains such flows.

One architecture, and each library's own way of writing it, down to its base distribution; what a
library cannot say as the others do stands in `DIFFERENCES`. Its networks, sizes and batches are
the same everywhere.
"""

import gc
import random
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from couplings import peak_and_held
from sklearn.datasets import make_moons
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

POINTS, NUM_COUPLINGS, UNITS = 512, 8, 64
IMAGES, WIDTH, DEPTHS = (16, 3, 16, 16), 32, (2, 8, 16)
REFERENCE = "recoup linear"
DIFFERENCES = {
    ("moons", "nflows"): "scales are a sigmoid, not bounded by a tanh",
    ("moons", "normflows"): "scales are an exp without a bound; swaps the halves between couplings",
    ("moons", "FrEIA"): "four blocks of two couplings; the base is written by hand, as in its docs",
    ("moons", "zuko"): "scales are bounded by a quotient, not a tanh",
    ("glow", "recoup linear, LU"): "1x1 convolutions in LU factors",
    ("glow", "nflows"): "1x1 convolutions in LU factors; scales are a sigmoid",
    ("glow", "normflows"): "scales are an exp without a bound",
    ("glow", "normflows, LU"): "1x1 convolutions in LU factors; scales are a sigmoid",
    ("glow", "FrEIA"): "1x1 convolutions are fixed rotations, which are not learned",
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
    """For nflows, which hands its networks a context, here None."""

    def forward(self, x, context=None):
        return super().forward(x)


# --- RealNVP on points ---------------------------------------------------------------------------


def recoup_moons(memory: str) -> Contestant:
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


LOG_2_PI = 1.8378770664093453


def zuko_moons() -> Contestant:
    from zuko.flows import RealNVP

    flow = RealNVP(2, transforms=NUM_COUPLINGS, hidden_features=(UNITS, UNITS))
    return Contestant(flow, lambda x: flow().log_prob(x), lambda n: flow().sample((n,)))


MOONS = {
    "recoup linear": partial(recoup_moons, "linear"),
    "recoup constant": partial(recoup_moons, "constant"),
    "nflows": nflows_moons,
    "normflows": normflows_moons,
    "FrEIA": freia_moons,
    "zuko": zuko_moons,
}


# --- Glow on images ------------------------------------------------------------------------------


def scales() -> list[tuple[int, int, int]]:
    """Channels, height and width of each of two scales, after its squeeze."""
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
            library.flows.GlowBlock(
                c, WIDTH, scale_map=scale_map, init_zeros=False, use_lu=use_lu
            )
            for _ in range(num_steps)
        ]
        flows.append([*steps, library.flows.Squeeze()])
        merges += [library.flows.Merge()] if index else []
        # Of what is split off, half of the channels.
        shape = (c // 2 if index else c, h, w)
        bases.append(library.distributions.DiagGaussian(shape, trainable=False))
    flow = library.MultiscaleFlow(bases, flows, merges, class_cond=False)
    return Contestant(flow, lambda x: flow.log_prob(x, None), lambda n: flow.sample(n)[0])


def freia_glow(num_steps: int) -> Contestant:
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
                        "permute_soft": True,
                        "global_affine_type": "EXP",
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
    "recoup sqrt": partial(recoup_glow, "sqrt", InvertibleConv1x1),
    "recoup constant": partial(recoup_glow, "constant", InvertibleConv1x1),
    "nflows": nflows_glow,
    "normflows": partial(normflows_glow, False, "exp"),
    "normflows, LU": partial(normflows_glow, True, "sigmoid"),
    "FrEIA": freia_glow,
}


# --- measuring -----------------------------------------------------------------------------------


def points(device: str) -> Tensor:
    found, _ = make_moons(POINTS, noise=0.1, random_state=0)
    return torch.tensor(found, dtype=torch.float32, device=device)


def images(device: str) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(IMAGES, device=device)


def made(builder: Callable[[], Contestant], device: str, x: Tensor) -> Contestant:
    """Make one, start its ActNorms, allocate its gradients and see that all of it works."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers use deprecated names of torch
        contestant = builder()
        contestant.module.to(device)
        training_step(contestant, x)
        contestant.module.eval()
        with torch.no_grad():
            log_prob, sample = contestant.log_prob(x), contestant.sample(len(x))
        contestant.module.train()
    assert log_prob.shape == (len(x),), log_prob.shape
    assert log_prob.isfinite().all()
    assert sample.shape == x.shape, sample.shape
    assert sample.isfinite().all()
    return contestant


def training_step(contestant: Contestant, x: Tensor) -> None:
    (-contestant.log_prob(x).mean()).backward()


@torch.no_grad()
def density(contestant: Contestant, x: Tensor) -> None:
    contestant.log_prob(x)


@torch.no_grad()
def sampling(contestant: Contestant, x: Tensor) -> None:
    contestant.sample(len(x))


TASKS = {"training": training_step, "log_prob": density, "sampling": sampling}


def seconds(
    contestants: dict[str, Contestant], x: Tensor, rounds: int, turn: int
) -> dict[str, dict[str, dict]]:
    """Time of each task: all contestants in every round, in an order of its own, `turn` steps each.

    One thread's processor time. What ran before decides what the caches hold, so the first step
    of a turn does not count, where there are several.
    """
    clock = time.process_time if x.device.type == "cpu" else time.perf_counter
    found: dict[str, dict[str, dict]] = {name: {} for name in contestants}
    order = random.Random(0)
    for task, run in TASKS.items():
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for contestant in contestants.values():
            contestant.module.train(task == "training")
        for _ in range(rounds):
            for name in order.sample(list(contestants), len(contestants)):
                if turn > 1:
                    run(contestants[name], x)
                _wait(x)
                start = clock()
                for _ in range(turn):
                    run(contestants[name], x)
                _wait(x)
                times[name].append((clock() - start) / turn)
        reference = times[REFERENCE]
        for name, values in times.items():
            ratios = [value / ours for value, ours in zip(values, reference, strict=True)]
            found[name][task] = {
                "min_seconds": min(values),
                "median_seconds": statistics.median(values),
                "min_over_ours": min(values) / min(reference),
                "median_over_ours": statistics.median(ratios),
            }
    return found


def _wait(x: Tensor) -> None:
    if x.device.type != "cpu":
        torch.cuda.synchronize()


def rows(
    suite: str,
    builders: dict[str, Callable[[], Contestant]],
    x: Tensor,
    rounds: int,
    turn: int,
) -> list[dict]:
    device = x.device.type
    contestants = {name: made(builder, device, x) for name, builder in builders.items()}
    peaks = {}
    for name, contestant in contestants.items():
        gc.collect()
        peaks[name] = peak_and_held(partial(training_step, contestant, x), device)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = seconds(contestants, x, rounds, turn)
    return [
        {
            "name": name,
            "num_parameters": sum(
                p.numel() for p in contestant.module.parameters() if p.requires_grad
            ),
            "peak_bytes": peaks[name],
            **{f"{task}_{key}": v for task, row in times[name].items() for key, v in row.items()},
            "rounds": rounds,
            "difference": DIFFERENCES.get((suite, name), ""),
        }
        for name, contestant in contestants.items()
    ]


def moons(device: str) -> list[dict]:
    return rows("moons", MOONS, points(device), rounds=60, turn=4)


def glow(device: str) -> list[dict]:
    found = []
    for num_steps in DEPTHS:
        builders = {name: partial(build, num_steps) for name, build in GLOWS.items()}
        for row in rows("glow", builders, images(device), rounds=max(12, 80 // num_steps), turn=1):
            found.append({"num_steps": num_steps, **row})
    return found


def suite(device: str) -> dict[str, list[dict]]:
    return {"moons": moons(device), "glow": glow(device)}
