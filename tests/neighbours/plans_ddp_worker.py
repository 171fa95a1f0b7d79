"""One of two processes with a plan under DistributedDataParallel and FSDP2."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import recoup
from tests.neighbours.planned import Language, Net, loss_of
from tests.neighbours.workers import report, said

SHARES = {"least": 0.0, "middle": 0.5}


class Counting(Net):
    """Has no norm over the batch, whose halves two processes see, and no draws."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
        for block in self.blocks:
            block.drop = nn.Identity()


def build() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Counting(), torch.randn(512, 32)


def half(x: Tensor, rank: int) -> Tensor:
    return x.chunk(2)[rank]


def plan_of(model: nn.Module, x: Tensor, share: float, room_bytes: int = 0) -> recoup.Plan:
    whole = recoup.plan(model, x, budget="1 GiB", loss=loss_of)
    budget = whole.least_bytes + int((whole.most_bytes - whole.least_bytes) * share)
    made = recoup.plan(model, x, budget=budget + room_bytes, loss=loss_of)
    assert {row.way for row in made.blocks} != {"keep"}
    return made


def late_bytes(model: nn.Module) -> int:
    """The bytes that gloo's own threads may hold for a moment longer than FSDP2: two collectives.

    Of two steps, one may thus take the parameters and the gradients of a gathered block more.
    """
    return 2 * max(sum(p.nbytes for p in block.parameters()) for block in model.blocks)


def gradient(parameter: Tensor) -> Tensor:
    found: Any = parameter.grad
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def furthest(model: nn.Module, whole: nn.Module) -> float:
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return max(float((gradient(p) - q.grad).abs().max()) for p, q in pairs)


def steps(call: nn.Module, model: nn.Module, whole: nn.Module, x: Tensor, rank: int) -> float:
    worst = 0.0
    for step in range(2):
        model.zero_grad()
        whole.zero_grad()
        loss_of(whole((1 + step) * x)).backward()
        loss_of(call((1 + step) * half(x, rank))).backward()
        worst = max(worst, furthest(model, whole))
    return worst


def ddp_after(rank: int, share: float) -> float:
    model, x = build()
    whole = copy.deepcopy(model)
    plan_of(model, half(x, rank), share).apply()
    return steps(DistributedDataParallel(model), model, whole, x, rank)


def ddp_before(rank: int, share: float) -> float:
    model, x = build()
    whole = copy.deepcopy(model)
    call = DistributedDataParallel(model)
    plan_of(model, half(x, rank), share).apply()
    return steps(call, model, whole, x, rank)


def ddp_itself(rank: int, share: float) -> float:
    model, x = build()
    whole = copy.deepcopy(model)
    call = DistributedDataParallel(model)
    plan_of(call, half(x, rank), share).apply()
    return steps(call, model, whole, x, rank)


def ddp_accumulated(rank: int, share: float) -> float:
    model, x = build()
    whole = copy.deepcopy(model)
    call = DistributedDataParallel(model)
    plan_of(model, half(x, rank), share).apply()
    loss_of(whole(x)).backward()
    loss_of(whole(2 * x)).backward()
    with call.no_sync():
        loss_of(call(half(x, rank))).backward()
    loss_of(call(2 * half(x, rank))).backward()
    return furthest(model, whole)


def ddp_peak(rank: int, share: float) -> float:
    """The part of the budget that a step takes, without the buckets of gradients."""
    model, x = build()
    call = DistributedDataParallel(model)
    made = plan_of(model, half(x, rank), share).apply()

    def step() -> None:
        loss_of(call(half(x, rank))).backward()

    for _ in range(3):  # in which the buckets come about
        step()
        model.zero_grad()
    return recoup.measure(step, device="cpu", repeats=0).peak_bytes / made.budget_bytes


def fsdp(rank: int, share: float) -> float:
    model, x = build()
    whole = copy.deepcopy(model)
    room_bytes = late_bytes(model)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    plan_of(model, half(x, rank), share, room_bytes).apply()
    return steps(model, model, whole, x, rank)


def fsdp_root(rank: int, share: float) -> float:
    model, x = build()
    whole = copy.deepcopy(model)
    room_bytes = late_bytes(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    plan_of(model, half(x, rank), share, room_bytes).apply()
    return steps(model, model, whole, x, rank)


def fsdp_uneven(rank: int, share: float) -> list[Any]:
    """Ranks whose batches differ decide the same, by the larger one (Rule 2 of ranks.py)."""
    model, x = build()
    room_bytes = late_bytes(model)
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    made = plan_of(model, x[: 100 + 300 * rank], share, room_bytes)
    ways = [row.way for row in made.blocks]
    return [made.budget_bytes, made.least_bytes, made.rehearsed_peak_bytes, ways]


def fsdp_tiles(rank: int, share: float) -> list[float]:
    """A head in tiles, on ranks whose batches differ: gradients are those of the plain steps."""
    torch.manual_seed(0)
    model, mesh = Language(), init_device_mesh("cpu", (2,))
    tokens = torch.randint(2048, (4, 100 + 28 * rank))
    for each in (*model.blocks, model):
        fully_shard(each, mesh=mesh)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(tokens).backward()
        return [gradient(each) for each in model.parameters()]

    frontier = recoup.plan(model, tokens, tiles=True)
    plain = recoup.plan(model, tokens)
    made = frontier.plan(frontier.least_bytes + int(share * plain.least_bytes / 4))
    assert made.planned.tiled is not None
    wanted = gradients()
    with made.applied():
        pairs = zip(gradients(), wanted, strict=True)
        off = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return [off, made.least_bytes / plain.least_bytes]


def pipeline(rank: int, share: float) -> list[Any]:
    """One of two stages under 1F1B: gradients as without a plan, and what is beyond the budget."""
    torch.manual_seed(rank)
    model, num = Counting(), 6
    batch, targets = torch.randn(2, num * 64, 32)

    def step() -> None:
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, num, loss_fn=F.mse_loss)
        schedule.step(batch) if rank == 0 else schedule.step(target=targets)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        step()
        return [gradient(each) for each in model.parameters()]

    example = batch[:64].clone().requires_grad_(rank > 0)
    loss = partial(F.mse_loss, target=targets[:64]) if rank else None
    frontier = recoup.plan(model, example, loss=loss)
    most = frontier.plan("1 GiB", pending=1 - rank)
    budget = most.least_bytes + int(share * (most.most_bytes - most.least_bytes))
    wanted = gradients()
    with frontier.plan(budget, pending=1 - rank).applied() as made:
        found = gradients()
        model.zero_grad()
        dist.barrier()
        peak = recoup.measure(step, device="cpu", repeats=0).peak_bytes
    own = (2 * num + 2) * example.nbytes  # what the pipeline itself receives, sends and returns
    same = all(map(torch.equal, found, wanted))
    return [same, peak - budget - own, {row.way for row in made.blocks} != {"keep"}]


CASES = (
    ddp_after, ddp_before, ddp_itself, ddp_accumulated, ddp_peak, fsdp, fsdp_root, fsdp_uneven,
    fsdp_tiles, pipeline,
)  # fmt: skip


def cases(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {
        f"{case.__name__} {name}": said(case, rank, share)
        for case in CASES
        for name, share in SHARES.items()
    }


if __name__ == "__main__":
    report(cases)
