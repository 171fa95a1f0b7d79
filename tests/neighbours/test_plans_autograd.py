"""A planned model among hooks, checkpoints, threads and the ways of autograd: as the plain one."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import RecoupError
from tests.alive import no_collector
from tests.neighbours.planned import Block, Net, fresh, loss_of, peak_of, plan_for, result_of
from tests.oracle import assert_same_tensors, loss_of_all
from tests.ways import SITUATIONS, assert_same, left_by, outcome
from tests.weight_zoo import OURS

in_shares = pytest.mark.parametrize("share", [0.0, 0.5], ids=["least", "middle"])


def chain(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    net, x = fresh()
    model = nn.Sequential(net.stem, *net.blocks, net.head)
    return model.to(dtype), x.to(dtype).requires_grad_()


def simple(model: nn.Module, x: Tensor) -> None:
    loss_of(model(x)).backward()


def batches_of_other_sizes(model, x):
    loss_of_all(model(x[:7])).backward()
    is_planned = recoup.applied_plans(model) != []
    with pytest.warns(match="where the plan is for") if is_planned else nullcontext():
        loss_of_all(model(torch.cat([x, x]))).backward()
    return left_by(model, x)


def scaled(model, x):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of_all(model(x))).backward()
        scaler.step(optimizer)
        scaler.update()
    return [*left_by(model, x), *(p.detach() for p in model.parameters())]


def blocks_in(order):
    """Blocks in other numbers, or in another order, than those of the planned step."""

    def situation(model, x):
        for place in order:
            x = model[place](x)
        loss_of_all(x).backward()
        return left_by(model, None)

    return situation


OTHERWISE = {
    "some blocks": blocks_in([1, 2, 3]),
    "blocks twice": blocks_in([1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
    "blocks in reverse": blocks_in([5, 4, 3, 2, 1]),
    "blocks left out": blocks_in([0, 1, 3, 5, 6]),
}
STEPS = SITUATIONS | {"batches of other sizes": batches_of_other_sizes, "scaled": scaled}
STEPS |= OTHERWISE
# They call the model for the second time before the first backward.
PENDING = {
    "two_forwards", "two_forwards_together", "input_used_beside", "evaluated_in_between",
    "forward_in_between", "second_runs_that_fail", "threads_with_a_graph_each",
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The first step of a Sequential under its plan:UserWarning")
@pytest.mark.filterwarnings("ignore:.*called otherwise")
@in_shares
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_plain_one(name: str, share: float):
    dtype = torch.float32 if "autocast" in name else torch.float64
    (model, x), (plain, _) = chain(dtype), chain(dtype)
    options: dict[str, Any] = {"loss": loss_of_all, "holds_output": False}
    if name in PENDING:
        options |= {"num_forwards": 4, "loss": lambda *outputs: sum(map(loss_of_all, outputs))}
    wanted = outcome(plain, x, STEPS[name])
    with plan_for(model, x, share=share, **options).applied():
        assert_same(outcome(model, x, STEPS[name]), wanted)


def test_transforms_are_right_or_an_error():
    model, x = fresh()
    model.eval()
    wanted = torch.func.grad(lambda x: loss_of(model(x)))(x)
    with plan_for(model, x).applied():
        try:
            assert torch.equal(torch.func.grad(lambda x: loss_of(model(x)))(x), wanted)
        except RecoupError as error:
            assert "transforms" in str(error)  # noqa: PT017 - right, or this


WEIGHTS = OURS | {"torch's norm": parametrizations.weight_norm}


# A norm of torch that is applied after planning keeps copies, of which the first step warns.
@pytest.mark.filterwarnings("ignore:The first step of a Net under its plan took")
@pytest.mark.filterwarnings("ignore:.*with more parameters than it was planned with")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_before", [True, False])
@in_shares
@pytest.mark.parametrize("name", WEIGHTS)
def test_reparametrized_weights_in_a_planned_step(name: str, share: float, is_before: bool):
    found = []
    for is_planned in (False, True):
        model, x = fresh()
        step = partial(simple, model, x)
        apply = lambda: [WEIGHTS[name](block.up) for block in model.blocks[3:]]  # noqa: B023, E731
        if is_before:
            apply()
        plan = plan_for(model, x, share=share) if is_planned else None
        with nullcontext() if plan is None else plan.applied():
            if not is_before:
                apply()
            result_of(model, step)
            found.append(result_of(model, step))
            assert plan is None or not is_before or peak_of(step) <= plan.budget_bytes
    assert_same_tensors(*found)


@pytest.mark.slow
@in_shares
def test_nothing_is_left_of_many_steps(share: float):
    model, x = fresh()
    plan_for(model, x, share=share).apply()
    some_blocks = lambda: loss_of(model.blocks[1](model.blocks[0](x))).backward()  # noqa: E731
    trains = partial(simple, model, x)
    for _ in range(3):
        handle = model.blocks[3].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
    gc.collect()
    with no_collector(), StorageTracker() as tracker:
        for run in (lambda: model(x) is None, trains, some_blocks, trains):
            levels = set()
            for _ in range(20):
                run()
                model.zero_grad()
                levels.add(tracker.current_bytes)
            assert len(levels) == 1
        assert levels == {0}


def test_a_model_is_what_it_was():
    model, x = fresh()
    model.blocks[1].forward = model.blocks[1].forward  # somebody else's
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    show = lambda: [repr(type(model)), str(model), *model.state_dict()]  # noqa: E731
    shown, plan = show(), plan_for(model, x).apply()
    assert show() == shown
    assert isinstance(model, Net)
    plan.remove()
    assert [type(each) for each in (model, *model.blocks)] == [Net, *[Block] * 5]
    for name, module in model.named_modules():
        assert list(vars(module)) == list(before[name])
        assert all(vars(module)[key] is value for key, value in before[name].items())
