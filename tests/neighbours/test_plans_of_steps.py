"""Whole steps under a plan: forwards, modes, losses outside, and what cannot be planned."""

from __future__ import annotations

import contextlib
import gc
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.errors import BudgetError
from tests import plan_oracle
from tests.alive import allocated_bytes
from tests.neighbours.planned import Block, Net, assert_same, loss_of, result_of
from tests.plan_oracle import Made, between
from tests.weight_zoo import Uses


def net(block: Any = Block) -> Net:
    torch.manual_seed(0)
    return Net(block=block, num_blocks=4)


def batch(size: int = 64) -> Tensor:
    return torch.randn(size, 32, generator=torch.Generator().manual_seed(size))


def plan_at(share: float, model: nn.Module, x: Tensor, **options: Any) -> recoup.Plan:
    """The plan for a budget between the least (0) and what a plain step takes (1)."""
    frontier = recoup.plan(model, x, **options)
    return frontier.plan(between(frontier, share))


def several(*outputs: Tensor) -> Tensor:
    """A loss in which all outputs meet (SimCSE, R-Drop, MNRL)."""
    ones = torch.stack(outputs)
    return loss_of(ones) + (ones - ones.mean(0)).square().sum()


def peak_of(model: nn.Module, step: Any) -> int:
    """The peak of a step by the allocator's events; the model is as before."""
    return result_of(model, lambda: [allocated_bytes(step)[0]])["returned 0"]


assert_as_plain = partial(plan_oracle.assert_as_plain, peak=peak_of)


def step_of(model: nn.Module, num: int, x: Tensor, loss: Any = several) -> Any:
    return lambda: loss(*(model(x) for _ in range(num))).backward()


# --- several forwards before one backward ---------------------------------------------------------


@pytest.mark.parametrize(("num", "share"), [(2, 0.0), (3, 0.5)])
def test_forwards_that_are_planned_together(num: int, share: float):
    model, x = net(), batch()
    steps = step_of(model, num, x), step_of(model, 1, x)
    wanted = [result_of(model, step) for step in steps]
    with plan_at(share, model, x, loss=several, num_forwards=num).applied() as plan:
        assert len(plan.blocks) == num * len(model.blocks)
        for step, result in [*zip(steps, wanted, strict=True)] * 2:
            assert_as_plain(plan, step, result)


def in_an_object(model: Any, x: Tensor) -> Any:
    """An output that is an attribute of an object in an object."""
    return SimpleNamespace(inner=SimpleNamespace(found=model.net(x)))


def test_a_forward_too_many_is_an_error_before_it_takes_memory():
    model, x = Made(in_an_object, net=net()), batch()
    loss = lambda output: loss_of(output.inner.found)  # noqa: E731
    with plan_at(0.5, model, x, loss=loss).applied() as plan:
        loss(model(x)).backward()  # the first step, which is watched
        first = model(x)

        def second() -> None:
            with pytest.raises(BudgetError, match=r"second time.*num_forwards=2") as caught:
                model(x)
            assert caught.value.least_bytes > plan.budget_bytes

        assert allocated_bytes(second)[0] < 1024
        loss(first).backward()  # what is pending no more, counts no more
        held = [loss(model(x))]
        held[0].backward(retain_graph=True)
        second()
        held[0].backward()
        for _ in range(3):
            model(x)  # dropped
        with torch.no_grad():
            outputs = [model(x) for _ in range(3)]
        loss(model(x)).backward()
        del outputs


@pytest.mark.parametrize("is_said", [True, False])
def test_replanning_for_more_forwards(is_said: bool):
    """Each step is right and within the budget, or an error."""
    model, x, num = Net(num_blocks=3), batch(), 3
    budget = int(1.1 * recoup.plan(model, x, loss=several, num_forwards=num).least_bytes)
    separate = lambda *outputs: sum(map(loss_of, outputs))  # noqa: E731
    step, larger = (step_of(model, num, given, separate) for given in (x, batch(70)))
    wanted, num_errors = result_of(model, step), 0
    options: Any = {"loss": separate, "num_forwards": num} if is_said else {"loss": loss_of}
    with recoup.plan(model, x, budget=budget, replan=True, **options).applied() as plan:
        for _ in range(3):
            try:
                assert_same(result_of(model, step), wanted)
            except BudgetError:
                num_errors += 1
        assert num_errors == 3 or len(plan.blocks) <= len(plan.family[-1].blocks)
        if is_said:
            assert num_errors == 0
            with contextlib.suppress(BudgetError):
                larger()  # which plans
                assert peak_of(model, larger) <= budget


# --- modes, losses and what is watched ------------------------------------------------------------


def test_a_plan_of_evaluation_is_not_for_training():
    model, x = net().eval(), batch()
    step = step_of(model, 1, x, loss_of)
    with plan_at(0.3, model, x, loss=loss_of).applied() as plan:
        step()
        for part, words in ((model, r".*model.train\(\).*replan=True"), (model.blocks[1], "")):
            part.train()
            with pytest.raises(ValueError, match=f"in evaluation mode{words}"):
                model(x)
            model.eval()
    options: Any = {"budget": plan.budget_bytes, "loss": loss_of, "replan": True}
    with recoup.plan(model, x, **options).applied() as plan:
        model.train()
        model(x)
        assert plan.family != (plan,)
        assert peak_of(model, step) <= plan.budget_bytes


def large(y: Tensor) -> Tensor:
    return (y[:, None] * y[None]).softmax(-1).square().mean()


def is_profiled() -> bool:
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def test_a_loss_outside_of_the_model_that_does_not_fit_is_said_once():
    model, x = net(), batch()
    plan = plan_at(1.1, model, x, loss=loss_of)
    with plan.applied(), pytest.warns(UserWarning, match=r"first step of a Net .* `loss=`"):
        large(model(x)).backward()
    assert not is_profiled()
    with plan.applied():
        loss_of(model(x)).backward()  # the first step fits
        large(model(x)).backward()


@pytest.mark.parametrize("replan", [False, True])
def test_a_graph_in_a_reference_cycle_is_not_pending(replan):
    model, x = net(), batch()
    budget = recoup.plan(model, x).least_bytes
    plan = recoup.plan(model, x, budget=budget, replan=replan).apply()
    gc.disable()
    try:
        output = [model(x)]
        output.append(output)
        del output
        model(x).abs().sum().backward()
    finally:
        gc.enable()
    assert plan.family == (plan,)


def test_the_watch_leaves_nothing_behind():
    model, x = net(), batch()
    step = step_of(model, 1, x, loss_of)
    plan = recoup.plan(model, x, budget="1 GiB", loss=loss_of)
    hidden = x.clone().requires_grad_()
    hidden.register_hook(lambda gradient: torch.ones(3, 5) @ x)
    with plan.applied():
        for fails in (
            lambda: model(x[:, :5]),
            lambda: loss_of(model(x)) + torch.ones(3, 5) @ x,
            lambda: loss_of(model(hidden)).backward(),
        ):
            with pytest.raises(RuntimeError):
                fails()
            assert not is_profiled()
    with recoup.plan(model, x, budget="1 GiB", loss=loss_of).applied():
        output = model(x)
        assert is_profiled()
    assert not is_profiled()  # the output is alive, and its backward has not come
    del output
    with plan.applied(), torch.profiler.profile(acc_events=True) as profiler:
        step()
    assert len(profiler.events()) > 0
    with plan.applied():
        first, again = (recoup.measure(step, device="cpu", repeats=0).peak_bytes for _ in "ab")
    assert first >= again > 0
    assert not is_profiled()


def test_energies_and_forces():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.Softplus(), nn.Linear(128, 32)) for _ in "abcd"]
    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), *blocks, nn.Linear(32, 1))
    positions = torch.randn(128, 3, requires_grad=True)

    def loss(energies: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return energies.square().mean() + force.square().mean()

    def step() -> list[Tensor]:
        positions.grad = None
        loss(model(positions)).backward()
        return [positions.grad]

    wanted, most = result_of(model, step), peak_of(model, step)
    positions.grad = None
    frontier = recoup.plan(model, positions, loss=loss)
    assert positions.grad is None
    assert frontier.least_bytes < 0.9 * most
    assert_as_plain(frontier.plan((frontier.least_bytes + most) // 2), step, wanted)


# --- what cannot be planned -----------------------------------------------------------------------


class Numpy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(np.random.rand()))


def test_blocks_that_cannot_run_again_are_kept_and_that_is_said():
    model, x = net(Numpy), batch()

    def step() -> None:
        np.random.seed(0)
        loss_of(model(x)).backward()

    wanted, words = result_of(model, step), "keeps everything. Its blocks cannot be run again"
    with pytest.warns(UserWarning, match=words) as said:
        plan = recoup.plan(model, x, budget="1 GiB", loss=loss_of)
    assert len(said) == 1
    assert assert_as_plain(plan, step, wanted) <= plan.rehearsed_peak_bytes
    with pytest.raises(BudgetError, match="cannot be run again"):
        recoup.plan(model, x, budget=plan.rehearsed_peak_bytes // 2, loss=loss_of)


def test_the_way_out_leaves_out_the_block_that_cannot_run_again():
    model = net()
    model.blocks[2] = Numpy()
    with pytest.warns(UserWarning, match=r"`blocks\.2`.*name them as `blocks`") as said:
        recoup.plan(model, batch(), budget="1 GiB", loss=loss_of)
    assert "draws of numpy" in str(said[0].message)
    others = ["blocks.0", "blocks.1", "blocks.3"]
    plan = recoup.plan(model, batch(), budget="1 GiB", loss=loss_of, blocks=others)
    assert [row.name for row in plan.blocks] == others
    assert plan.least_bytes < plan.most_bytes


WITHOUT_BLOCKS = {  # a model, its input, and what an error says
    "lstm": (
        lambda: Made(
            lambda model, x: torch.tanh(model.head(torch.tanh(model.lstm(x)[0]))),
            lstm=nn.LSTM(16, 32, batch_first=True), head=nn.Linear(32, 5),
        ),
        (4, 50, 16), "recurrent layer.*segments",
    ),
    "bare": (lambda: Uses(lambda x, w: torch.tanh(x @ w), 16, 16), (4, 16), "nn.Sequential"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WITHOUT_BLOCKS)
def test_any_module_has_blocks(name: str):
    build, shape, remedy = WITHOUT_BLOCKS[name]
    model, x = build(), torch.randn(shape)
    step = lambda: model(x).abs().sum().backward()  # noqa: E731
    wanted, peak = result_of(model, step), peak_of(model, step)
    assert_as_plain(recoup.plan(model, x, budget=2 * peak), step, wanted)
    with pytest.raises(BudgetError, match=remedy):
        recoup.plan(model, x, budget=100)
