"""One of two processes under DDP or FSDP2: the largest difference of each case."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import recoup
from tests.neighbours.workers import report, said


class Model(nn.Module):
    """A body and a head; it returns the loss, as a model with labels does."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 12)
        self.way = way

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.way == "plain":
            return self.loss(self.body(x), labels)
        hidden = recoup.tiled(self.body, tiles=3)(x)
        if self.way == "tiled":
            return recoup.tiled(self.loss, tiles=3, reduction="mean")(hidden, labels)
        return recoup.tiled_loss(self.loss, tiles=3)(hidden, labels)


def largest_difference(rank: int, way: str, wrapper: str) -> float:
    torch.manual_seed(1)
    x, labels = torch.randn(4, 7, 8), torch.randint(12, (4, 7))
    whole = Model("plain")
    whole(x, labels).backward()
    model = copy.deepcopy(whole)
    model.way = way
    model.zero_grad()
    if wrapper == "ddp":
        call = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        if wrapper == "fsdp, each":
            fully_shard(model.body, mesh=mesh)
            fully_shard(model.head, mesh=mesh)
        call = fully_shard(model, mesh=mesh)
    mine = slice(2 * rank, 2 * rank + 2)
    call(x[mine], labels[mine]).backward()
    worst = 0.0
    for got, want in zip(model.parameters(), whole.parameters(), strict=True):
        found = got.grad
        if found is None:
            return float("inf")
        found = found if wrapper == "ddp" else found.full_tensor()
        worst = max(worst, float((found - want.grad).abs().max()))
    return worst


def cases(rank: int) -> dict[str, float]:
    return {
        f"{way} {wrapper}": said(largest_difference, rank, way, wrapper)
        for way in ("tiled", "tiled_loss")
        for wrapper in ("ddp", "fsdp, each", "fsdp, whole")
    }


if __name__ == "__main__":
    report(cases)
