"""One of two processes under FSDP2; writes the largest difference found.

Run as ``python fsdp_worker.py RANK FOLDER``.
"""

from __future__ import annotations

import copy
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import recoup
from recoup.invertible import AdditiveCoupling, Chain


def build(memory: str) -> nn.Module:
    torch.manual_seed(0)
    if memory == "constant":
        networks = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(4)]
        return Chain(*(AdditiveCoupling(network) for network in networks))
    return recoup.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(5)))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return (output[0] if isinstance(output, tuple) else output).square().mean()


def main(rank: int, folder: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    x = torch.randn(6, 8)
    with (folder / f"found-{rank}").open("w", encoding="utf-8") as file:
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
                file.write(f"{memory} {sharded} {worst}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
