"""Schedules on a chain of layers with one value each, executed and counted."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import recoup
from recoup import schedules

NUM_VALUES = 4096  # a layer keeps one tensor of this size, which is the unit


class Tanh(nn.Module):
    """A layer that keeps one value, and counts how often it runs."""

    num_forwards = 0

    def forward(self, x):
        Tanh.num_forwards += 1
        return x.tanh()


def _measured(run, x):
    Tanh.num_forwards = 0
    found = recoup.measure(lambda: run(x).sum().backward(), device="cpu", repeats=0)
    unit = NUM_VALUES * x.element_size()
    return {"num_forwards": Tanh.num_forwards, "peak_units": round(found.peak_bytes / unit, 2)}


def sequential(num_layers: int) -> list[dict]:
    x = torch.randn(NUM_VALUES, requires_grad=True)
    x.grad = torch.zeros_like(x)
    layers = [Tanh() for _ in range(num_layers)]
    plain = nn.Sequential(*layers)
    segments = round(num_layers**0.5)
    runs = {
        "plain": plain,
        f"torch checkpoint_sequential, {segments} segments": lambda x: checkpoint_sequential(
            plain, segments, x, use_reentrant=False
        ),
        "recoup sqrt": recoup.Sequential(*layers, memory="sqrt"),
        "recoup log": recoup.Sequential(*layers, memory="log"),
        "recoup 44 slots": recoup.Sequential(*layers, memory=44),
    }
    return [{"name": name, "layers": num_layers, **_measured(run, x)} for name, run in runs.items()]


def binomial() -> list[dict]:
    """Execute every row of the table of optima."""
    rows = []
    x = torch.randn(64, requires_grad=True)
    for num_layers, slots in (
        (10, 1), (10, 2), (10, 3), (50, 3), (50, 8), (100, 3), (100, 5), (100, 8), (100, 13),
        (100, 50), (1000, 8), (1000, 16), (1000, 44), (1000, 200),
    ):  # fmt: skip
        Tanh.num_forwards = 0
        model = recoup.Sequential(*[Tanh() for _ in range(num_layers)], memory=slots)
        model(x).sum().backward()
        rows.append(
            {
                "layers": num_layers,
                "slots": slots,
                "num_forwards": Tanh.num_forwards,
                "optimum": schedules.num_advances(num_layers, slots) + 1,
            }
        )
    return rows


def suite(device: str) -> Iterator[tuple[str, list[dict]]]:
    """Yield the tables, which are counted and the same on every device."""
    del device
    yield "sequential", [*sequential(100), *sequential(1000)]
    yield "binomial", binomial()
