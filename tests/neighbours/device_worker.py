"""A model with dropout on a simulated accelerator, in every way; writes what each found as JSON."""

from __future__ import annotations

import copy
import itertools
import json
import sys

import torch
from torch import nn

import recoup
from recoup.errors import RecoupError
from tests import simulated_device as simulated


def blocks():
    return [
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.4), nn.GELU())
        for _ in range(5)
    ]


def step(forward, parameters, x):
    """The gradients of a step and the two random streams after it, as tensors of the CPU."""
    torch.manual_seed(3)
    x = x.detach().requires_grad_()
    forward(x).sum().backward()
    found = [x.grad, *(parameter.grad for parameter in parameters)]
    for parameter in parameters:
        parameter.grad = None
    found = [each.held if isinstance(each, simulated.SimulatedTensor) else each for each in found]
    return [*found, torch.rand(3), torch.rand(3, generator=simulated.generator)]


def chain(memory):
    return lambda model: recoup.Sequential(*model, memory=memory)


def recomputed(model):
    return recoup.recompute_(copy.copy(model), nn.Dropout, nn.GELU)


def counted(calls, x):
    return (x * (1.0 + next(calls))).sin().exp()


WAYS = {
    "checkpoint": lambda model: lambda x: recoup.checkpoint(model, x),
    "recompute": recoup.recompute,
    "recompute_": recomputed,
    **{f"Sequential {memory}": chain(memory) for memory in ("inputs", "sqrt", "log", 2)},
}


def main():
    library = simulated.set_up()
    torch.manual_seed(0)
    model, x = nn.Sequential(*blocks()), torch.randn(4, 8)
    on_cpu = step(model, list(model.parameters()), x)
    model, x = simulated.on_device(model), simulated.on_device(x)
    wanted = step(model, list(model.parameters()), x)
    found = {"plain, as on the CPU": all(map(torch.equal, wanted[:-2], on_cpu[:-2]))}
    for name, way in WAYS.items():
        made = step(way(model), list(model.parameters()), x)
        found[name] = all(map(torch.equal, made, wanted))
    calls = itertools.count()
    try:
        recoup.checkpoint(counted, calls, x.detach().requires_grad_()).sum().backward()
    except RecoupError as error:
        found["a counter"] = type(error).__name__
    del library
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
