"""One rank of four that are not there, with plans of sharded models; writes a table as JSON."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import recoup
from recoup.planning.ranks import CollectiveCounter
from tests.neighbours.planned import Net, loss_of

NUM_RANKS = 4


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_parallel(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def row(parallelize, mesh, num_samples):
    torch.manual_seed(0)
    model, x = Net(), torch.randn(num_samples, 32)
    for block in model.blocks:
        block.drop = nn.Identity()
    model = parallelize(model, mesh)

    def step():
        loss_of(model(x)).backward()
        model.zero_grad()

    step()
    with CollectiveCounter() as plain:
        step()
    frontier = recoup.plan(model, x, loss=loss_of)
    least = frontier.least_bytes
    plan = frontier.plan(least)
    with plan.applied(), CollectiveCounter() as planned:
        step()
    with plan.applied():
        peak = recoup.measure(step, device="cpu", repeats=0).peak_bytes
    assert (plan.collectives, plan.collectives_again) == (planned.num_all, planned.num_again)
    return {
        "least": least,
        "peak": peak,
        "plain": plain.num_all,
        "all": plan.collectives,
        "again": plan.collectives_again,
        "forwards": sum(each.num_forwards for each in plan.blocks) - len(plan.blocks),
        "text": str(plan),
    }


def main():
    rank = int(sys.argv[1])
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    found = {
        "sharded": row(sharded, mesh, 400 + 100 * rank),  # each has a batch of its own
        "in_parallel": row(in_parallel, mesh, 512),
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
