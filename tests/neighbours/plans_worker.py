"""Plans under DDP, FSDP2 and in a pipeline: gradients as without them, within the budget."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import recoup
from tests.neighbours.planned import Net, loss_of, peak_of, plan_for
from tests.neighbours.workers import (
    Case,
    apart,
    half,
    named_gradients,
    of_all_ranks,
    report,
    sharded,
)


class Plain(Net):
    """Has no norm over the batch, whose halves two processes see, and no draws."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
        for block in self.blocks:
            block.drop = nn.Identity()


def of_blocks(model: Any) -> Any:
    return sharded(model, model.blocks)


def late_bytes(model: Any) -> int:
    """The bytes that gloo's own threads may hold for a moment longer than FSDP2: two collectives.

    Of two steps, one may thus take the parameters and the gradients of a gathered block more.
    """
    return 2 * max(sum(p.nbytes for p in block.parameters()) for block in model.blocks)


def whole_batch(
    rank: int,
    share: float,
    before: Callable[[Any], Any] = lambda model: model,
    after: Callable[[Any], Any] = lambda model: model,
    *,
    accumulates: bool = False,
) -> None:
    """Steps of a model that is wrapped before or after it is planned."""
    model, x = Plain(), torch.randn(512, 32)
    whole, late = copy.deepcopy(model), late_bytes(model)
    call = before(model)
    more_bytes = late if isinstance(model, FSDPModule) else 0
    plan_for(model, half(x, rank), share=share, more_bytes=more_bytes).apply()
    call = after(call)
    if accumulates:
        with call.no_sync():
            loss_of(call(half(x, rank))).backward()
        loss_of(whole(x)).backward()
    for scale in (1, 2):
        if not accumulates:
            model.zero_grad()
            whole.zero_grad()
        loss_of(whole(scale * x)).backward()
        loss_of(call(scale * half(x, rank))).backward()
        assert apart(named_gradients(model), named_gradients(whole)) < 1e-6


def budget_of_ddp(rank: int, share: float) -> None:
    """Kept to without the buckets of gradients, which come about in the first steps."""
    model, x = Plain(), torch.randn(512, 32)
    call = DistributedDataParallel(model)
    plan = plan_for(model, half(x, rank), share=share).apply()
    step = lambda: loss_of(call(half(x, rank))).backward()  # noqa: E731
    for _ in range(3):
        step()
        model.zero_grad()
    assert peak_of(step) <= plan.budget_bytes


def a_wrapped_model_is_refused(rank: int, share: float) -> None:
    call = DistributedDataParallel(Plain())
    with pytest.raises(ValueError, match="`model` is a DistributedDataParallel"):
        plan_for(call, torch.randn(256, 32), share=share)


def ranks_that_hold_parts_of_one_model_make_one_plan(rank: int, share: float) -> None:
    """That of the larger batch; else one would wait for a rehearsal that the other does not run."""
    model, late = Plain(), late_bytes(Plain())
    x = torch.randn(100 + 300 * rank, 32)
    plan = plan_for(of_blocks(model), x, share=share, more_bytes=late)
    assert plan.least_bytes <= plan.rehearsed_peak_bytes <= plan.budget_bytes
    ways = [row.way for row in plan.blocks]
    mine = [plan.budget_bytes, plan.least_bytes, plan.rehearsed_peak_bytes, ways]
    assert of_all_ranks(mine) == [mine] * 2


def stages_of_a_pipeline(rank: int, share: float) -> None:
    """Under 1F1B: gradients as without a plan, each stage within its budget."""
    torch.manual_seed(rank)
    model, num = Plain(), 6
    batch, targets = torch.randn(2, num * 64, 32)

    def step() -> None:
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, num, loss_fn=F.mse_loss)
        schedule.step(batch) if rank == 0 else schedule.step(target=targets)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        step()
        return named_gradients(model)

    example = batch[:64].clone().requires_grad_(rank > 0)
    loss = partial(F.mse_loss, target=targets[:64]) if rank else None
    frontier = recoup.plan(model, example, loss=loss)
    most = frontier.plan("1 GiB", pending=1 - rank)
    budget = most.least_bytes + int(share * (most.most_bytes - most.least_bytes))
    wanted = {name: gradient.clone() for name, gradient in gradients().items()}
    with frontier.plan(budget, pending=1 - rank).applied() as plan:
        found = {name: gradient.clone() for name, gradient in gradients().items()}
        model.zero_grad()
        dist.barrier()
        peak = peak_of(step)
    assert apart(found, wanted) == 0.0
    assert {row.way for row in plan.blocks} != {"keep"}
    own = (2 * num + 2) * example.nbytes  # what the pipeline itself receives, sends and returns
    assert peak <= budget + own


PROMISES: dict[str, Callable[[int, float], None]] = {
    "the whole batch, ddp after": partial(whole_batch, after=DistributedDataParallel),
    "the whole batch, ddp before": partial(whole_batch, before=DistributedDataParallel),
    "the whole batch, accumulated": partial(
        whole_batch, before=DistributedDataParallel, accumulates=True
    ),
    "the whole batch, fsdp of blocks": partial(whole_batch, before=of_blocks),
    "the whole batch, fsdp": partial(whole_batch, before=sharded),
    **{
        promise.__name__: promise
        for promise in (
            budget_of_ddp, a_wrapped_model_is_refused, stages_of_a_pipeline,
            ranks_that_hold_parts_of_one_model_make_one_plan,
        )
    },
}  # fmt: skip


def started(rank: int, promise: Callable[[int, float], None], share: float) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        promise(rank, share)


LEAST = ("the whole batch, ddp before", "the whole batch, fsdp of blocks", "stages_of_a_pipeline")
CASES: dict[str, Case] = {
    **{name: partial(started, promise=each, share=0.5) for name, each in PROMISES.items()},
    **{f"{name}, least": partial(started, promise=PROMISES[name], share=0.0) for name in LEAST},
}

if __name__ == "__main__":
    report(CASES)
