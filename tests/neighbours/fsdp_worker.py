"""One of two processes under FSDP2: the largest difference of each case."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import recoup
from recoup.invertible import AdditiveCoupling, Chain
from tests.neighbours.workers import report


def build(memory: str) -> nn.Module:
    torch.manual_seed(0)
    if memory == "constant":
        networks = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(4)]
        return Chain(*(AdditiveCoupling(network) for network in networks))
    return recoup.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(5)))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return (output[0] if isinstance(output, tuple) else output).square().mean()


def cases(rank: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    x = torch.randn(6, 8)
    found: dict[str, float] = {}
    for memory in ("sqrt", "constant"):
        for sharded in ("stages", "whole"):
            model = build(memory)
            whole = copy.deepcopy(model)
            loss(whole, x).backward()
            if sharded == "stages":
                for stage in list(model):
                    fully_shard(stage, mesh=mesh)
            fully_shard(model, mesh=mesh)
            model.memory = memory
            loss(model, x[3 * rank : 3 * rank + 3]).backward()
            pairs = zip(model.parameters(), whole.parameters(), strict=True)
            worst = max(float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs)
            found[f"{memory} {sharded}"] = worst
    return found


if __name__ == "__main__":
    report(cases)
