"""One of several processes that train a model together, each within a byte budget.

The tutorial runs it as ``torchrun --nproc-per-node=2 two_ranks.py``.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import recoup

NUM_STEPS = 5


def build() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    blocks = [
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        for _ in range(8)
    ]
    return nn.Sequential(*blocks)


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).square().mean()


def train(way: str, device: torch.device) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = build().to(device)
    x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(1))
    x = x.chunk(num_ranks)[rank].to(device)  # each rank has its part of the batch

    if way == "fsdp":
        mesh = init_device_mesh(device.type, (num_ranks,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)  # shard first, then plan
    plan = recoup.plan(model, x, budget="8 MiB", loss=loss_fn).apply()  # on every rank
    called = DistributedDataParallel(model) if way == "ddp" else model  # plan first, then wrap

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(NUM_STEPS):
        loss = loss_fn(called(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / num_ranks)
        losses.append(f"{mean.item():.4f}")
    if rank == 0:
        ways = ", ".join(sorted({row.way for row in plan.blocks}))
        print(f"{way} on {num_ranks} ranks: blocks {ways}; peak {plan.rehearsed_peak_bytes} bytes")
        print("losses", *losses)


def main() -> None:
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if use_cuda else "gloo")
    for way in ("ddp", "fsdp"):
        train(way, torch.device("cuda" if use_cuda else "cpu"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
