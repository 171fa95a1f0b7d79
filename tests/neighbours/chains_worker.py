"""One of two processes under DDP or FSDP2: the largest difference of each case."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup.invertible import AdditiveCoupling, Chain
from tests.neighbours.workers import report, said

MEMORIES = ["sqrt", 1, "constant"]
CASES = ["plain", "unused", "shared", "FSDP2, stages", "FSDP2, whole"]


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
        kind, blocks = Chain, [AdditiveCoupling(network(), network()) for _ in range(4)]
        if case == "unused":
            blocks[1].register_module("unused", nn.Linear(2, 2))
    else:
        kind = recoup.Sequential
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)]
        if case == "unused":
            blocks[1] = Skips()
    if case == "shared":
        blocks[3] = blocks[0]
    return First(kind(*blocks, memory=memory)).double()


def network():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def wrapped(model, case):
    if not case.startswith("FSDP2"):
        return DistributedDataParallel(model, find_unused_parameters=case == "unused")
    mesh = init_device_mesh("cpu", (2,))
    for stage in model.chain if case == "FSDP2, stages" else ():
        fully_shard(stage, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def largest_difference(rank, memory, case):
    model = build(memory, case)
    plain = copy.deepcopy(model)
    plain.chain.memory = "linear"
    call, worst = wrapped(model, case), 0.0
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(8, 6).double()
        plain.zero_grad()
        model.zero_grad()
        plain(x).square().mean().backward()
        call(x[4 * rank : 4 * rank + 4]).square().mean().backward()
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            found = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
            if found is None or want.grad is None:
                is_same = want.grad is None and (found is None or not found.any())
                worst = worst if is_same else float("inf")
            else:
                worst = max(worst, float((found - want.grad).abs().max()))
    return worst


def cases(rank):
    return {
        f"{memory} {case}": said(largest_difference, rank, memory, case)
        for memory in MEMORIES
        for case in CASES
    }


if __name__ == "__main__":
    report(cases)
