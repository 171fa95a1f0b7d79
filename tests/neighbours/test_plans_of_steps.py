"""Whole steps under a plan: forwards, losses, what changes, and what cannot be planned."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup._core.kept_products import _KeptTensor as KeptTensor
from recoup._core.surroundings import Surroundings
from recoup.errors import BudgetError, ReplayError
from recoup.planning import measuring, priced_blocks
from recoup.planning import step as planning_step
from recoup.planning.verification import Verification, outcome_of
from recoup.planning.work import WorkCounter, counted_seconds, timed_by_work
from tests import plan_oracle
from tests.alive import allocated_bytes
from tests.neighbours.planned import Block, Net, fresh, loss_of, plan_for, result_of
from tests.plan_oracle import Made, between, in_a_row, stack, ways_of


def net(block: Any = Block) -> Net:
    torch.manual_seed(0)
    return Net(block=block, num_blocks=4)


def batch(size: int = 64) -> Tensor:
    return torch.randn(size, 32, generator=torch.Generator().manual_seed(size))


def plan_at(share: float, model: nn.Module, x: Tensor, **options: Any) -> recoup.Plan:
    frontier = recoup.plan(model, x, **options)
    return frontier.plan(between(frontier, share))


def several(*outputs: Tensor) -> Tensor:
    """A loss in which all outputs meet (SimCSE, R-Drop, MNRL)."""
    ones = torch.stack(outputs)
    return loss_of(ones) + (ones - ones.mean(0)).square().sum()


def peak_of(model: nn.Module, step: Any) -> int:
    return result_of(model, lambda: [allocated_bytes(step)[0]])["returned 0"]


assert_as_plain = partial(plan_oracle.assert_as_plain, peak=peak_of)


def step_of(model: nn.Module, num: int, x: Tensor, loss: Any = several) -> Any:
    return lambda: loss(*(model(x) for _ in range(num))).backward()


@pytest.mark.parametrize(("num", "share"), [(2, 0.0), (3, 0.5)])
def test_forwards_that_are_planned_together(num: int, share: float):
    model, x = net(), batch()
    steps = step_of(model, num, x), step_of(model, 1, x)
    wanted = [result_of(model, step) for step in steps]
    with plan_at(share, model, x, loss=several, num_forwards=num).applied() as plan:
        assert len(plan.blocks) == num * len(model.blocks)
        for step, result in [*zip(steps, wanted, strict=True)] * 2:
            assert_as_plain(plan, step, result)


def test_a_forward_too_many_is_an_error_before_it_takes_memory():
    in_an_object = lambda model, x: SimpleNamespace(found=[model.net(x)])  # noqa: E731
    model, x = Made(in_an_object, net=net()), batch()
    loss = lambda output: loss_of(output.found[0])  # noqa: E731
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


def is_profiled() -> bool:
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def test_a_loss_outside_of_the_model_that_does_not_fit_is_said_once():
    model, x = net(), batch()
    plan = plan_at(1.1, model, x, loss=loss_of)
    large = lambda y: (y[:, None] * y[None]).softmax(-1).square().mean()  # noqa: E731
    with plan.applied(), pytest.warns(UserWarning, match=r"first step of a Net .* `loss=`"):
        large(model(x)).backward()
    assert not is_profiled()
    with plan.applied():
        loss_of(model(x)).backward()  # the first step fits
        large(model(x)).backward()


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
    assert not is_profiled()


def test_energies_and_forces():
    blocks = stack(4, lambda: nn.Sequential(nn.Linear(32, 128), nn.Softplus(), nn.Linear(128, 32)))
    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), *blocks, nn.Linear(32, 1))
    positions = torch.randn(128, 3, requires_grad=True)

    def loss(energies: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return energies.square().mean() + force.square().mean()

    def step() -> list[Any]:
        loss(model(positions)).backward()
        found, positions.grad = positions.grad, None
        return [found]

    wanted, most = result_of(model, step), peak_of(model, step)
    frontier = recoup.plan(model, positions, loss=loss)
    assert positions.grad is None
    assert frontier.least_bytes < 0.9 * most
    assert_as_plain(frontier.plan((frontier.least_bytes + most) // 2), step, wanted)


class Numpy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(np.random.rand()))


class WritesToItsInput(Block):
    """Changes what it is given where no version counter sees it, also when it runs again."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.tanh_()
        return super().forward(x)


@pytest.mark.parametrize("block", [Numpy, WritesToItsInput])
def test_blocks_that_cannot_run_again_are_kept_and_that_is_said(block: Any):
    model, x = net(block), batch()

    def step() -> None:
        np.random.seed(0)
        loss_of(model(x)).backward()

    wanted, why = result_of(model, step), "keeps everything. Its blocks cannot be run again"
    why = why if block is Numpy else r"block `blocks\.\d` again .* did not repeat"
    with pytest.warns(UserWarning, match=why) as said:
        plan = recoup.plan(model, x, budget="1 GiB", loss=loss_of)
    assert len(said) == 1
    assert assert_as_plain(plan, step, wanted) <= plan.rehearsed_peak_bytes
    with pytest.raises(BudgetError, match="cannot be run again" if block is Numpy else why):
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


@pytest.mark.clocked
def test_a_plan_that_keeps_products_does_the_work_that_it_predicts(monkeypatch):
    """Masks save less than their counted work, as their bits are packed; products save more."""
    for module in (planning_step, measuring):
        monkeypatch.setattr(module, "now", counted_seconds)  # so that plans depend on no clock
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 96, 32)

    def work():
        counter = WorkCounter()
        with counter.counting():
            model(x).abs().sum().backward()
        return counter.work

    with timed_by_work():
        plain, frontier = work(), recoup.plan(model, x)
        with frontier.plan(between(frontier, 0.3)).applied() as plan:
            assert "keep products" in {block.way for block in plan.blocks}
            assert work() / plain == pytest.approx(plan.predicted_time_ratio, rel=0.006)


def scaled(block: Any, x: Tensor, *, shift: Tensor, items: dict[str, list[Tensor]]) -> Tensor:
    y = block.down(torch.tanh(block.up(x * block.scale)))
    return block.norm(x + y * torch.sin(x * shift) * torch.sin(x * items["inner"][0]))


def scaled_stack() -> Any:
    """Blocks with a buffer and a norm, which take a tensor by name, and one within others."""

    def block() -> Any:
        layers = {"up": nn.Linear(32, 128), "down": nn.Linear(128, 32), "norm": nn.BatchNorm1d(32)}
        made = Made(scaled, **layers)
        made.register_buffer("scale", torch.ones(32))
        return made

    def forward(model: Any, x: Tensor) -> Tensor:
        return in_a_row([partial(each, **model.given) for each in model.blocks], x)

    model: Any = Made(forward, blocks=[block() for _ in range(4)])
    model.given = {"shift": torch.randn(32), "items": {"inner": [torch.randn(32)]}}
    return model


def other_memory(model: Any) -> None:
    model.blocks[0].up.weight.data = 2 * model.blocks[0].up.weight.data


IN_PLACE, AGAIN = "modified by an inplace operation|changed in place", "block `blocks.0` again"
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {  # the change, and the error if it is one
    "step": (lambda m: [p.detach().sub_(0.1) for p in m.parameters()], IN_PLACE),
    "keyword": (lambda m: m.given["shift"].add_(1), IN_PLACE),
    "mode": (lambda m: m.eval(), ""),
    "buffer": (lambda m: m.blocks[0].scale.mul_(2), AGAIN),
    "other forward": (
        lambda m: setattr(m.blocks[0].up, "forward", lambda x: x.repeat(1, 4)), AGAIN
    ),
    "other item": (lambda m: m.given["items"]["inner"].insert(0, torch.zeros(32)), ""),
    "other layer": (
        lambda m: setattr(m.blocks[0], "up", nn.Linear(32, 128)),
        "block `blocks.0` .* a module in it was replaced",
    ),
    "other memory": (other_memory, AGAIN),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The first step of a Made")  # a change takes memory, too
@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_in_a_planned_model(what: str):
    torch.manual_seed(0)
    model, x, (change, text) = scaled_stack(), torch.randn(64, 32), CHANGES[what]
    step_of(model, 1, x, loss_of)()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with plan_for(model, x, share=0.0).applied() as plan:
        assert plan.blocks[0].way != "keep"
        loss = loss_of(model(x))
        change(model)
        if text:
            with pytest.raises(RuntimeError, match=text):
                loss.backward()
            return
        loss.backward()
    assert all(torch.equal(p.grad, wanted[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("of_arguments", [False, True])
def test_products_that_are_kept_wrong_are_not_planned(of_arguments: bool, monkeypatch: Any):
    """As if a write to what is kept had gone unseen; with gradients of arguments alone, too."""
    model, x = fresh()
    model.requires_grad_(not of_arguments)
    x.requires_grad_(of_arguments)
    plain = result_of(model, step_of(model, 1, x, loss_of))
    x.grad = None
    plan = plan_for(model, x)
    assert "keep products" in ways_of(plan)
    get = KeptTensor.get
    monkeypatch.setattr(KeptTensor, "get", lambda self: get(self).mul_(1.01))
    monkeypatch.setattr(Surroundings, "decides_anew", lambda self: False)
    with pytest.warns(UserWarning, match="keeps no results of products"):
        plan = recoup.plan(model, x, budget=plan.budget_bytes, loss=loss_of)
    assert x.grad is None
    assert "keep products" not in ways_of(plan)
    assert_as_plain(plan, step_of(model, 1, x, loss_of), plain)


calls = itertools.count()


class Counts(Block):
    """Reads Python state that changes from run to run, where nobody looks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + 0.1 * (next(calls) % 97))


@pytest.mark.parametrize("has_room", [True, False])
def test_a_model_whose_steps_differ_is_refused(has_room: bool, monkeypatch: Any):
    """Without room for a plain step it is the measured one that a step is compared with."""
    words = r"gradient of parameter `.*` by about .* leave that"
    if not has_room:
        monkeypatch.setattr(priced_blocks, "has_room", lambda device, num_bytes: False)
        words = "differs from the measured one"
        plan_for(*fresh())
    with pytest.raises(ReplayError, match=words):
        plan_for(*fresh(block=Counts))


def test_the_plain_step_takes_the_place_of_the_measured_one():
    module = nn.Linear(1, 9)
    module.weight.grad = torch.ones(9, 1)
    measured = outcome_of(module, ())
    module.weight.grad[7] = 2.0
    plain, verification = outcome_of(module, ()), Verification()
    for outcome in (measured, plain, measured):
        verification.expect(outcome, is_plain=outcome is plain)
    assert verification.difference(plain) is None
    assert verification.difference(measured) is not None


def test_gradients_that_are_missing_sparse_or_complex():
    module = nn.Embedding(20, 4, sparse=True)
    module.other = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    module.register_buffer("count", torch.zeros((), dtype=torch.long))
    for change, words in (
        (lambda: module(torch.tensor([1, 2])).sum().backward(), "gradient of parameter `weight`"),
        (lambda: module.other.conj().real.sum().backward(), "gradient of parameter `other`"),
        (lambda: module.count.add_(1), "buffer `count`"),
        (lambda: torch.rand(()), "the random stream"),
    ):
        verification = Verification()
        verification.expect(outcome_of(module, ()), is_plain=True)
        change()
        assert words in (verification.difference(outcome_of(module, ())) or "")
