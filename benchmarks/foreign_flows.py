"""Flows of zuko, nflows, normflows and FrEIA by themselves and in constant memory, by one line.

`RECOUP_QUICK=1 python benchmarks/run.py foreign_flows` is a small size of everything.
"""

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import FrEIA.framework as framework
import FrEIA.modules as freia
import nflows.distributions
import nflows.flows
import nflows.transforms as nft
import normflows
import numpy as np
import torch
import zuko
from nflows.nn.nets import ResidualNet
from sklearn.datasets import load_digits, make_moons
from timing import in_turn, ratio
from torch import Tensor, nn

import recoup
from recoup.flows import chains_of

QUICK = bool(os.environ.get("RECOUP_QUICK"))
DIM, CONTEXT, BATCH, WIDTH = 6, 3, 64, 64
DEPTHS, ROUNDS, STEPS = ((4, 8), 1, 10) if QUICK else ((8, 16, 32), 7, 200)
Flow = Any


def mask(index: int, size: int) -> Tensor:
    return torch.arange(size) % 2 == index % 2


# -- flows of vectors with a context -------------------------------------------------------------


def zuko_of(kind: Any, depth: int, width: int, dim: int = DIM, context: int = CONTEXT) -> Flow:
    options = {"hidden_features": (width, width), "activation": nn.SiLU}
    return kind(dim, context, transforms=depth, **options)


def zuko_spline(depth: int, width: int, dim: int = DIM, context: int = CONTEXT) -> Flow:
    from zuko.flows.coupling import GeneralCouplingTransform

    layers = [
        GeneralCouplingTransform(
            dim, context, mask=mask(index, dim), univariate=zuko.transforms.MonotonicRQSTransform,
            shapes=[(8,), (8,), (7,)], hidden_features=(width, width), activation=nn.SiLU,
        )
        for index in range(depth)
    ]  # fmt: skip
    return zuko.flows.Flow(layers, zuko.flows.RealNVP(dim, context, transforms=1).base)


def nflows_of(layers: list[Any], shape: list[int]) -> Flow:
    base = nflows.distributions.StandardNormal(shape)
    return nflows.flows.Flow(nft.CompositeTransform(layers), base)


def residual(width: int, context: int) -> Callable[[int, int], nn.Module]:
    return lambda num_in, num_out: ResidualNet(
        num_in, num_out, hidden_features=width, context_features=context or None, num_blocks=1,
        activation=nn.functional.silu,
    )  # fmt: skip


def nflows_couplings(
    kind: Any, options: dict, depth: int, width: int, dim: int = DIM, context: int = CONTEXT
) -> Flow:
    layers = []
    for index in range(depth):
        coupling = kind(mask(index, dim), residual(width, context), **options)
        layers += [coupling, nft.LULinear(dim)]
    return nflows_of(layers, [dim])


def nflows_autoregressive(depth: int, width: int, dim: int = DIM, context: int = CONTEXT) -> Flow:
    layers = []
    for _ in range(depth):
        options = {"context_features": context or None, "activation": nn.functional.silu}
        layers.append(nft.MaskedAffineAutoregressiveTransform(dim, width, **options))
        layers.append(nft.ReversePermutation(dim))
    return nflows_of(layers, [dim])


class Normal(nn.Module):
    """A standard normal that takes a context, as normflows' conditional flows ask for."""

    def log_prob(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return -0.5 * z.square().flatten(1).sum(1)


def normflows_affine(depth: int, width: int, dim: int = DIM, context: int = 0) -> Flow:
    layers = []
    for _ in range(depth):
        network = normflows.nets.MLP([dim // 2, width, width, dim], leaky=0.01)
        layers += [normflows.flows.AffineCouplingBlock(network)]
        layers += [normflows.flows.LULinearPermute(dim)]
    return normflows.NormalizingFlow(Normal(), layers)


def normflows_spline(depth: int, width: int, dim: int = DIM, context: int = CONTEXT) -> Flow:
    layers = []
    for _ in range(depth):
        layers.append(
            normflows.flows.CoupledRationalQuadraticSpline(
                dim, 1, width, num_context_channels=context or None, activation=nn.SiLU
            )
        )
        layers.append(normflows.flows.LULinearPermute(dim))
    kind = normflows.ConditionalNormalizingFlow if context else normflows.NormalizingFlow
    return kind(Normal(), layers)


def subnet(width: int) -> Callable[[int, int], nn.Module]:
    return lambda num_in, num_out: nn.Sequential(
        nn.Linear(num_in, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
        nn.Linear(width, num_out),
    )  # fmt: skip


def freia_of(kind: Any, depth: int, width: int, dim: int = DIM, context: int = CONTEXT) -> Flow:
    flow = framework.SequenceINN(dim)
    given = {"cond": 0, "cond_shape": (context,)} if context else {}
    for index in range(depth):
        flow.append(kind, subnet_constructor=subnet(width), **given)
        if kind is not freia.AllInOneBlock:
            flow.append(freia.PermuteRandom, seed=index)
    return flow


SPLINE = {"num_bins": 8, "tails": "linear", "tail_bound": 3.0}
VECTORS = {
    "zuko, affine couplings": partial(zuko_of, zuko.flows.RealNVP),
    "zuko, spline couplings": zuko_spline,
    "zuko, NSF (autoregressive)": partial(zuko_of, zuko.flows.NSF),
    "nflows, affine couplings": partial(nflows_couplings, nft.AffineCouplingTransform, {}),
    "nflows, spline couplings": partial(
        nflows_couplings, nft.PiecewiseRationalQuadraticCouplingTransform, SPLINE
    ),
    "nflows, MAF (autoregressive)": nflows_autoregressive,
    "normflows, affine couplings": normflows_affine,
    "normflows, spline couplings": normflows_spline,
    "FrEIA, AllInOneBlock": partial(freia_of, freia.AllInOneBlock),
    "FrEIA, GLOWCouplingBlock": partial(freia_of, freia.GLOWCouplingBlock),
}


# -- flows of images -----------------------------------------------------------------------------


class Conv(nn.Sequential):
    """A convolutional network; nflows gives it a context, of None."""

    def __init__(self, num_in: int, num_out: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(num_in, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, num_out, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor, context: None = None) -> Tensor:
        return super().forward(x)


def conv(width: int) -> Callable[[int, int], nn.Module]:
    return lambda num_in, num_out: Conv(num_in, num_out, width)


def nflows_images(depth: int, width: int) -> Flow:
    layers = []
    for index in range(depth):
        coupling = nft.AffineCouplingTransform(mask(index, 4), conv(width))
        layers += [nft.ActNorm(4), nft.OneByOneConvolution(4), coupling]
    return nflows_of(layers, [4, 8, 8])


def normflows_images(depth: int, width: int) -> Flow:
    layers = [normflows.flows.GlowBlock(4, width) for _ in range(depth)]
    return normflows.NormalizingFlow(Normal(), layers)


def freia_images(depth: int, width: int) -> Flow:
    flow = framework.SequenceINN(4, 8, 8)
    for _ in range(depth):
        flow.append(freia.AllInOneBlock, subnet_constructor=conv(width))
    return flow


IMAGES = {
    "nflows, Glow": nflows_images,
    "normflows, Glow": normflows_images,
    "FrEIA, AllInOneBlock": freia_images,
}


# -- what is measured ----------------------------------------------------------------------------


def built(build: Callable[..., Flow], *args: Any) -> Flow:
    torch.manual_seed(0)
    np.random.seed(0)
    return build(*args)


def log_prob(flow: Flow, x: Tensor, context: Tensor | None) -> Tensor:
    given = () if context is None else (context,)
    if isinstance(flow, zuko.flows.Flow):
        return flow(context).log_prob(x)
    if isinstance(flow, framework.SequenceINN):
        z, log_det = flow(x, c=list(given))
        return log_det - 0.5 * z.square().flatten(1).sum(1)
    if type(flow) is normflows.NormalizingFlow:
        return flow.log_prob(x)
    return flow.log_prob(x, *given)


def gradients(flow: Flow, x: Tensor, context: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(), context.detach().requires_grad_()]
    leaves += [p for p in flow.parameters() if p.requires_grad]
    loss = -log_prob(flow, *leaves[:2]).mean()
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True))


def error(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest error of a tensor, of its largest entry or a thousandth of the largest of all."""
    least = 1e-3 * max(float(each.abs().max()) for each in want)
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=least))
        for a, b in zip(got, want, strict=True)
    )


def step(flow: Flow, x: Tensor, context: Tensor | None) -> None:
    log_prob(flow, x, context).mean().backward()


def peak(flow: Flow, x: Tensor, context: Tensor | None) -> int:
    run = partial(step, flow, x, context)
    in_turn({"": run}, 2)
    return recoup.measure(run, repeats=0).peak_bytes


def depths() -> Iterator[dict]:
    for name, build in VECTORS.items():
        for depth in DEPTHS:
            torch.manual_seed(1)
            x, context = torch.randn(BATCH, DIM), torch.randn(BATCH, CONTEXT)
            plain = built(build, depth, WIDTH)
            ours = recoup.train_in(copy.deepcopy(plain))
            exact = copy.deepcopy(plain).double()
            exact_ours = recoup.train_in(copy.deepcopy(exact))
            own = gradients(plain, x, context)
            true = gradients(exact, x.double(), context.double())
            row = {
                "flow": name,
                "depth": depth,
                "error": error(gradients(ours, x, context), own),
                "own_error": error([each.double() for each in own], true),
                "error64": error(gradients(exact_ours, x.double(), context.double()), true),
                "drift": sum(chain.drift.total_error for chain in chains_of(ours)),
                "states_kept": sum(len(chain.drift.kept) for chain in chains_of(ours)),
            }
            row["own_bytes"], row["peak_bytes"] = peak(plain, x, context), peak(ours, x, context)
            yield row


def times() -> Iterator[dict]:
    sizes = [("vectors", VECTORS, (64, 1024)), ("images", IMAGES, (64, 128))]
    for kind, flows, widths in sizes:
        for name, build in flows.items():
            for width in (8,) if QUICK else widths:
                torch.manual_seed(1)
                is_image = kind == "images"
                x = torch.randn(BATCH, 4, 8, 8) if is_image else torch.randn(BATCH, DIM)
                context = None if is_image else torch.randn(BATCH, CONTEXT)
                plain = built(build, 8, width)
                log_prob(plain, x, context)  # layers start
                ours = recoup.train_in(copy.deepcopy(plain))
                steps = {"own": partial(step, plain, x, context)}
                steps["ours"] = partial(step, ours, x, context)
                in_turn(steps, 2)
                seconds = in_turn(steps, ROUNDS, clock=time.process_time)
                yield {
                    "flow": name,
                    "data": kind,
                    "width": width,
                    "own_seconds": min(seconds["own"]),
                    "time": ratio(seconds["ours"], seconds["own"]),
                    "least_time": min(seconds["ours"]) / min(seconds["own"]),
                    "bytes": peak(ours, x, context) / peak(plain, x, context),
                }


def trained(build: Callable[..., Flow], data: Tensor, depth: int, move: float, memory: str) -> Any:
    flow = built(build, depth, WIDTH, data.shape[1], 0)
    recoup.train_in(flow, memory)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        x = data[torch.randperm(len(data), generator=order)[:BATCH]] * (1 + move)
        loss = -log_prob(flow, x, None).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, chains_of(flow)


def trainings() -> Iterator[dict]:
    moons = torch.tensor(make_moons(1000, noise=0.05, random_state=0)[0], dtype=torch.float32)
    digits = torch.tensor(load_digits().data, dtype=torch.float32)
    torch.manual_seed(2)
    digits = ((digits + torch.rand_like(digits)) / 17 - 0.5) * 4
    for place, data in (("two moons", moons), ("digits", digits)):
        for name, build in VECTORS.items():
            if "autoregressive" in name:
                continue
            own, _ = trained(build, data, 8, 0.0, "linear")
            moved, _ = trained(build, data, 8, 1.2e-7, "linear")
            ours, chains = trained(build, data, 8, 0.0, "constant")
            pairs = list(zip(own, ours, moved, strict=True))
            yield {
                "data": place,
                "flow": name,
                "first_loss": own[0],
                "last_loss": own[-1],
                "last_loss_ours": ours[-1],
                "difference": max(abs(a - b) for a, b, _ in pairs),
                "difference_of_a_rounding": max(abs(a - c) for a, _, c in pairs),
                "states_kept": sum(len(chain.drift.kept) for chain in chains),
            }


def estimators() -> Iterator[dict]:
    """A posterior estimator of sbi, as its users train it; one line more (in `build`)."""
    try:
        from sbi.inference import NPE
        from sbi.neural_nets import posterior_nn
        from sbi.utils import BoxUniform
    except ImportError:
        return
    for model, depth in (("nsf", 8), ("maf", 8), ("zuko_nsf", 8), ("zuko_maf", 8)):
        found = {}
        for memory in ("linear", "constant"):
            torch.manual_seed(0)
            prior = BoxUniform(-2 * torch.ones(3), 2 * torch.ones(3))
            theta = prior.sample((500 if QUICK else 2000,))
            x = torch.cat([theta + 0.1 * torch.randn_like(theta), theta.square()], 1)
            make = posterior_nn(model, num_transforms=depth)

            def build(theta: Tensor, x: Tensor, make: Any = make, memory: str = memory) -> Any:
                return recoup.train_in(make(theta, x), memory)

            torch.manual_seed(1)
            inference = NPE(prior, density_estimator=build, show_progress_bars=False)
            estimator = inference.append_simulations(theta, x).train(max_num_epochs=5)

            def step(estimator: Any = estimator, theta: Tensor = theta, x: Tensor = x) -> None:
                estimator.loss(theta[:200], x[:200]).mean().backward()

            step()
            losses = inference.summary["training_loss"]
            found[memory] = losses, recoup.measure(step, repeats=0).peak_bytes
        (own, own_bytes), (ours, peak_bytes) = found["linear"], found["constant"]
        yield {
            "estimator": model,
            "own_bytes": own_bytes,
            "peak_bytes": peak_bytes,
            "last_loss": own[-1],
            "difference": max(abs(a - b) for a, b in zip(own, ours, strict=True)),
        }


def suite(device: str) -> Iterator[tuple[str, list]]:
    warnings.simplefilter("ignore")
    if device != "cpu":
        raise SystemExit("The flows of others are measured on the CPU.")
    yield "depths", list(depths())
    yield "times", list(times())
    yield "trainings", list(trainings())
    yield "estimators", list(estimators())
