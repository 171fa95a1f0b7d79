"""One of two processes under DistributedDataParallel: the largest difference of each case."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup.invertible import AdditiveCoupling, Chain
from tests.neighbours.workers import report


class Skips(nn.Module):
    """Leaves one parameter out of the graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x).tanh()


class First(nn.Module):
    def __init__(self, chain):
        super().__init__()
        self.chain = chain

    def forward(self, x):
        output = self.chain(x)
        return output[0] if isinstance(output, tuple) else output


def build(memory, case):
    torch.manual_seed(0)
    if memory == "constant":
        blocks = [
            AdditiveCoupling(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), half())
            for _ in range(4)
        ]
        if case == "unused":
            blocks[1].register_module("unused", nn.Linear(2, 2))
        kind = Chain
    else:
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)]
        if case == "unused":
            blocks[1] = Skips()
        kind = recoup.Sequential
    if case == "shared":
        blocks[3] = blocks[0]
    return First(kind(*blocks, memory=memory)).double()


def half():
    return nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())


def largest_difference(rank, memory, case):
    model = build(memory, case)
    plain = copy.deepcopy(model)
    plain.chain.memory = "linear"
    wrapped = DistributedDataParallel(model, find_unused_parameters=case == "unused")
    worst = 0.0
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(8, 6).double()
        plain.zero_grad()
        model.zero_grad()
        plain(x).square().mean().backward()
        wrapped(x[4 * rank : 4 * rank + 4]).square().mean().backward()
        parameters = dict(model.named_parameters())
        for name, want in plain.named_parameters():
            got = parameters[name].grad
            if want.grad is None:
                got = got if got is None else float(got.abs().max()) or None
                worst = max(worst, 0.0 if got is None else float("inf"))
            elif got is None:
                worst = float("inf")
            else:
                worst = max(worst, float((got - want.grad).abs().max()))
    return worst


def cases(rank):
    found = {}
    for memory in ("sqrt", "1", "constant"):
        for case in ("plain", "unused", "shared"):
            mode = int(memory) if memory.isdigit() else memory
            found[f"{memory} {case}"] = largest_difference(rank, mode, case)
    return found


if __name__ == "__main__":
    report(cases)
