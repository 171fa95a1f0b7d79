"""Errors of the gradients of stiff chains with and without the drift guard, and its time."""

import statistics
from collections.abc import Iterator
from functools import partial

import torch
from couplings import SHAPE, networks
from timing import clock_of, in_turn
from torch import nn

from recoup.invertible import AdditiveCoupling, Chain, DriftGuard

HALF, WIDTH, BATCH = 32, 64, 64


def dense(scale: float) -> nn.Module:
    network = nn.Sequential(nn.Linear(HALF, WIDTH), nn.Tanh(), nn.Linear(WIDTH, HALF))
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(scale)
    return network


def gradient(chain: Chain, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y, _ = chain(x)
    found = torch.autograd.grad(y.square().mean(), [x, *chain.parameters()])
    return torch.cat([part.flatten() for part in found])


def stiff(device: str) -> list[dict]:
    """Return the error of the gradient relative to linear memory, the worst of three steps."""
    rows = []
    for scale in (1.0, 2.0, 3.0):
        for depth in (10, 50, 200, 500):
            torch.manual_seed(0)
            pairs = [(dense(scale), dense(scale)) for _ in range(depth)]
            chain = Chain(*(AdditiveCoupling(f, g) for f, g in pairs)).to(device)
            x = torch.randn(BATCH, 2 * HALF, device=device)
            expected = gradient(chain, x)
            chain.memory = "constant"
            row = {"scale": scale, "depth": depth}
            for name, guard in (("unguarded", "ignore"), ("guarded", "recompute")):
                chain.drift = DriftGuard(guard)
                errors = [(gradient(chain, x) - expected).norm() for _ in range(3)]
                row[f"{name}_error"] = float(max(errors) / expected.norm())
            row["num_kept"] = len(chain.drift.kept)
            rows.append(row)
    return rows


def overhead(device: str, rounds: int = 40) -> list[dict]:
    """Return the time of a step of 16 conv couplings with the guard over one without."""
    pairs = networks(16, 0.0)
    chain = Chain(*(AdditiveCoupling(f, g, condition="second") for f, g in pairs)).to(device)
    chain.memory = "constant"
    x = torch.randn(SHAPE, device=device)

    def guarded(guard: DriftGuard) -> None:
        chain.drift = guard
        gradient(chain, x)

    steps = {name: partial(guarded, DriftGuard(name)) for name in ("ignore", "recompute")}
    times = in_turn(steps, rounds, device, clock_of(device))
    best = {name: min(found) for name, found in times.items()}
    median = {name: statistics.median(found) for name, found in times.items()}
    return [
        {
            "rounds": rounds,
            "guarded_over_unguarded": best["recompute"] / best["ignore"],
            "median_over_unguarded": median["recompute"] / median["ignore"],
        }
    ]


def suite(device: str) -> Iterator[tuple[str, list[dict]]]:
    """Yield the tables."""
    yield "stiff", stiff(device)
    yield "overhead", overhead(device)
