"""Speed and memory of a RealNVP on points and of a small Glow, beside other libraries of flows.

One thread; `flow_rivals` has the contestants. With RECOUP_QUICK=1 it takes seconds.
"""

import gc
import os
import statistics
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from couplings import peak_and_held
from flow_rivals import DIFFERENCES, GLOWS, IMAGES, MOONS, Contestant
from rivals import installed
from timing import clock_of, in_turn, ratio
from torch import Tensor

QUICK = bool(os.environ.get("RECOUP_QUICK"))
POINTS, DEPTHS = 512, (2,) if QUICK else (2, 8, 16)
REFERENCE = "recoup linear"


def points(device: str) -> Tensor:
    """Two half circles, one within the other, with noise."""
    torch.manual_seed(0)
    angles = torch.pi * torch.rand(POINTS)
    outer = torch.stack([angles.cos(), angles.sin()], 1)
    found = torch.where(
        torch.arange(POINTS)[:, None] % 2 == 0, outer, torch.tensor([1, 0.5]) - outer
    )
    return (found + 0.1 * torch.randn(POINTS, 2)).to(device)


def images(device: str) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(IMAGES, device=device)


def made(builder: Callable[[], Contestant], device: str, x: Tensor) -> Contestant:
    """Build a flow, initialize its ActNorms, allocate its gradients and check that it works."""
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
    """Time of each task: all contestants in every round, `turn` steps each.

    One thread's processor time. What ran before decides what the caches hold, so the first step
    of a turn does not count, where there are several.
    """
    device = x.device.type
    found: dict[str, dict[str, dict]] = {name: {} for name in contestants}
    for task, run in TASKS.items():
        for contestant in contestants.values():
            contestant.module.train(task == "training")
        steps = {name: partial(run, contestant, x) for name, contestant in contestants.items()}
        times = in_turn(steps, rounds, device, clock_of(device), calls=turn, is_warm=turn == 1)
        reference = times[REFERENCE]
        for name, values in times.items():
            found[name][task] = {
                "min_seconds": min(values),
                "median_seconds": statistics.median(values),
                "min_over_ours": min(values) / min(reference),
                "median_over_ours": ratio(values, reference),
            }
    return found


def rows(
    suite: str,
    builders: dict[str, Callable[[], Contestant]],
    x: Tensor,
    rounds: int,
    turn: int,
) -> list[dict]:
    device = x.device.type
    contestants = {name: made(builder, device, x) for name, builder in installed(builders).items()}
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
    return rows("moons", MOONS, points(device), rounds=2 if QUICK else 60, turn=4)


def glow(device: str) -> Iterator[list[dict]]:
    """Yield the rows so far, after each depth."""
    found = []
    for num_steps in DEPTHS:
        builders = {name: partial(build, num_steps) for name, build in GLOWS.items()}
        rounds = 2 if QUICK else max(20, 80 // num_steps)
        measured = rows("glow", builders, images(device), rounds, turn=1)
        found += [{"num_steps": num_steps, **row} for row in measured]
        yield found


def suite(device: str) -> Iterator[tuple[str, list[dict]]]:
    """Yield the tables; that of Glow again with each depth."""
    yield "moons", moons(device)
    for found in glow(device):
        yield "glow", found
