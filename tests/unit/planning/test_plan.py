"""What a plan finds, says, draws and refuses."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any
from unittest.mock import MagicMock
from xml.etree.ElementTree import fromstring

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from recoup.planning import priced_blocks
from recoup.planning.measuring import Times
from tests.planned_zoo import MODELS


class Residual(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def stack(num_blocks: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual() for _ in range(num_blocks)))


def batch() -> torch.Tensor:
    return torch.ones(64, 32)


def step(model, x):
    model(x).square().sum().backward()


def peak_of(model, x) -> int:
    model.zero_grad()
    return recoup.measure(lambda: step(model, x), device="cpu", repeats=0).peak_bytes


def square(y):
    return y.square().sum()


def plan(model, x, budget, **options):
    return recoup.plan(model, x, budget=budget, loss=square, **options)


def middle(model, x):
    whole = plan(model, x, "1 GiB")
    return (whole.least_bytes + whole.most_bytes) // 2


# -- blocks ----------------------------------------------------------------------------------------


class Staged(nn.Module):
    """Lists of blocks in a list, and blocks of other classes beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(Residual(), Residual()) for _ in range(2))
        self.neck = nn.Sequential(nn.Linear(32, 32), nn.ReLU())

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.neck(x)


def test_blocks_are_those_of_inner_lists():
    names = [row.name for row in plan(Staged(), batch(), "1 GiB").blocks]
    assert names == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


def test_experts_are_no_blocks():
    case = MODELS["moe"]()
    names = [row.name for row in recoup.plan(case.model, *case.args, budget="1 GiB").blocks]
    assert names == [f"layers.{i}" for i in range(4)]


def test_links_of_a_sequence():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    assert [row.name for row in plan(model, torch.ones(2, 8), "1 MiB").blocks] == ["0", "1", "2"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("blocks", [r"[02]", ["0", "2"], (0, 2)])
def test_blocks_that_are_named(blocks):
    model = stack()
    given = [model[i] for i in blocks] if isinstance(blocks[0], int) else blocks
    rows = plan(model, batch(), "1 GiB", blocks=given).blocks
    assert [row.name for row in rows] == ["0", "2"]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("h\\.[0-9]", r"`blocks` is 'h\\\\\.\[0-9\]', which matches the name of no module"),
        (["7"], "`blocks` has '7', which is no module of Sequential"),
        ([nn.Linear(2, 2)], "`blocks` has Linear, which is no module"),
        ([], "`blocks` is empty"),
        (["0", "0.up"], "`blocks` contains `0` and `0.up`, which is part of it"),
    ],
)
def test_blocks_that_are_none(blocks, message):
    with pytest.raises(ValueError, match=message):
        plan(stack(), batch(), "1 GiB", blocks=blocks)


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["2 GiBBB", -1, "much"])
def test_a_budget_that_is_none(budget):
    with pytest.raises(ValueError, match="`budget` is "):
        plan(stack(), batch(), budget)


def test_a_loss_that_is_none():
    with pytest.raises(ValueError, match=r"`loss` returned a tensor of shape \(64, 32\)"):
        recoup.plan(stack(), batch(), budget="1 GiB", loss=lambda y: y)


def test_nothing_to_differentiate():
    with pytest.raises(ValueError, match="returned nothing that requires a gradient"):
        plan(stack().requires_grad_(False), batch(), "1 GiB")


def test_budgets_of_other_things():
    model = stack()
    with pytest.raises(ValueError, match="`budget_of` is 'steps'"):
        plan(model, batch(), "1 GiB", budget_of="steps")
    with pytest.raises(ValueError, match='counts only with budget_of="total"'):
        plan(model, batch(), "1 GiB", optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"Plan for `model.module`"):
        plan(nn.DataParallel(model), batch(), "1 GiB")


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "num_copies"),
    [(torch.optim.SGD, 0), (lambda p: torch.optim.SGD(p, momentum=0.9), 1), (torch.optim.Adam, 2)],
)
def test_a_total_counts_what_is_alive_before(make, num_copies):
    model, x = stack(), batch()
    optimizer = make(model.parameters())
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    total = plan(model, x, "1 GiB", budget_of="total", optimizer=optimizer)
    steps = 4 * len(list(model.parameters())) if num_copies == 2 else 0
    assert total.baseline_bytes == (1 + num_copies) * size + steps
    assert total.least_bytes == plan(model, x, "1 GiB").least_bytes + total.baseline_bytes
    with pytest.raises(BudgetError, match="of which are alive before a step"):
        plan(model, x, total.least_bytes - 1, budget_of="total", optimizer=optimizer)
    step(model, x)
    optimizer.step()
    again = plan(model, x, "1 GiB", budget_of="total", optimizer=optimizer)
    assert again.baseline_bytes == total.baseline_bytes


# -- what it does ----------------------------------------------------------------------------------


def test_apply_and_remove_leave_the_model_as_it_was():
    model, x = stack(), batch()
    before = [dict(vars(module)) for module in model.modules()]
    made = plan(model, x, middle(model, x))
    assert [dict(vars(module)) for module in model.modules()] == before
    plain = peak_of(model, x)
    assert made.apply() is made
    assert made.is_applied
    assert peak_of(model, x) <= made.budget_bytes < plain
    made.remove()
    made.remove()
    assert peak_of(model, x) == plain
    model.zero_grad()
    assert [dict(vars(module)) for module in model.modules()] == before


def test_copies_have_no_plan():
    model, x = stack(), batch()
    plain = peak_of(model, x)
    with plan(model, x, middle(model, x)).applied():
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert peak_of(other, x) == plain
            assert list(other.state_dict()) == list(model.state_dict())
    assert peak_of(model, x) == plain


@pytest.mark.slow
def test_a_plan_is_the_same_every_time():
    model, x = stack(), batch()
    budget = middle(model, x)
    schedules = [plan(model, x, budget).schedule for _ in range(3)]
    assert schedules[0] == schedules[1] == schedules[2]


def test_what_the_model_returned_counts_unless_it_is_let_go():
    model, x = stack(), batch()
    model.append(nn.Linear(32, 4096))
    options = {"budget": "1 GiB", "loss": lambda y: y.exp().sum(), "blocks": r"[0-5]"}
    held = recoup.plan(model, x, **options).least_bytes
    let_go = recoup.plan(model, x, holds_output=False, **options).least_bytes
    assert held - let_go == pytest.approx(64 * 4096 * 4, abs=64)


def test_nothing_outlives_a_forward_without_backward():
    model, x = stack(), batch()

    def forward() -> None:
        model(x)

    gc.disable()
    try:
        with plan(model, x, middle(model, x)).applied():
            for _ in range(2):
                assert recoup.measure(forward, device="cpu", repeats=0).held_bytes == 0
    finally:
        gc.enable()


def test_schedule_says_what_is_run():
    model, x = stack(), batch()
    made = plan(model, x, plan(model, x, "1 GiB").least_bytes)
    simulation = recoup.schedules.simulate(made.schedule, costs=made.costs)
    assert simulation.peak_bytes == made.predicted_peak_bytes
    runs = []
    for module in model:
        forward = type(module).forward
        vars(module)["forward"] = lambda x, m=module, f=forward: (runs.append(1), f(m, x))[1]
    with plan(model, x, made.budget_bytes).applied():
        runs.clear()
        step(model, x)
    assert len(runs) == sum(row.num_forwards for row in made.blocks)


# -- chains of ours --------------------------------------------------------------------------------


@pytest.mark.slow
def test_bytes_as_a_memory_mode():
    x = batch()
    plain = stack()
    budget = middle(plain, x)
    chain = recoup.Sequential(*copy.deepcopy(plain), memory=f"{budget} B")
    for model in (plain, chain):
        model.zero_grad()
        step(model, x)
    for a, b in zip(plain.parameters(), chain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert peak_of(chain, x) <= budget < peak_of(plain, x)
    other = copy.deepcopy(chain)
    assert other.memory == chain.memory
    assert peak_of(other, x) > 0
    chain.memory = "linear"
    assert peak_of(chain, x) == peak_of(plain, x)
    with pytest.raises(ValueError, match="`memory` is '3 GiBs'"):
        chain.memory = "3 GiBs"
    chain.memory = "1 KiB"
    with pytest.raises(BudgetError, match="the least that a step"):
        chain(x)


# -- what it shows ---------------------------------------------------------------------------------


def test_the_report_names_blocks_ways_and_bytes():
    model, x = stack(), batch()
    made = plan(model, x, middle(model, x))
    text = str(made)
    assert f"least feasible {recoup.memory.format_bytes(made.least_bytes)}" in text
    for row in made.blocks:
        assert row.way in text
        assert row.keeps_bytes + row.saves_bytes == made.costs[int(row.name)].tape_bytes
    assert sum(row.seconds > 0 for row in made.blocks) == sum(
        row.num_forwards > 1 for row in made.blocks
    )


def test_the_repr_is_one_line_and_the_html_says_what_is_printed():
    model, x = stack(), batch()
    made = plan(model, x, middle(model, x))
    ways = [row.way for row in made.blocks]
    size = f"6 blocks in {recoup.memory.format_bytes(made.budget_bytes)} (step)"
    assert repr(made).startswith(f"Plan(Sequential, {size}: ")
    assert repr(made).endswith("; not applied)")
    for way in set(ways):
        assert f" {ways.count(way)} {way};" in repr(made)
    assert repr(made).index(" keep") < repr(made).index(" recompute")
    table = fromstring(made._repr_html_())
    assert [cell.text for cell in table.find("table/thead/tr")][:3] == ["block", "class", "way"]
    lines = str(made).splitlines()
    rows = [" ".join(cell.text for cell in row) for row in table.find("table/tbody")]
    assert rows == [" ".join(line.split()) for line in lines[4 : 4 + len(rows)]]
    assert table.find("p/b").text == lines[0]


def test_names_that_are_html_are_text_in_a_notebook():
    class Odd(nn.Sequential):
        pass

    Odd.__name__ = "<script>&"
    made = plan(Odd(*stack(2)), batch(), "1 GiB")
    assert fromstring(made._repr_html_()).find("p/b").text.startswith("Plan for <script>&: ")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fraction", [0, 1])
def test_all_times_of_a_plan_are_seconds(monkeypatch, fraction):
    """The costs are divided so that whole steps take what the clock said."""
    model, x = stack(), batch()
    again = [0.5, 0.25, 0.25, 0.5, 0.25, 0.25]
    times = Times(plain=6.0, again=again, share=0.0)  # products do not pay
    monkeypatch.setattr(priced_blocks, "times_of", lambda *args, **kwargs: times)
    whole = plan(model, x, "1 GiB")
    made = plan(model, x, whole.most_bytes if fraction else whole.least_bytes)
    assert [cost.seconds for cost in made.costs] == pytest.approx([*again, 0.0])
    pays = sum(row.seconds for row in made.blocks)
    assert pays > 0 or fraction
    assert made.predicted_time_ratio == pytest.approx((6.0 + pays) / 6.0)
    assert whole.predicted_time_ratio == 1.0
    for point in made.frontier:
        simulation = recoup.schedules.simulate(point.schedule, costs=made.costs)
        assert point.seconds == pytest.approx(simulation.seconds)


@pytest.mark.clocked
def test_plans_by_the_clock_fall_in_time_as_budgets_grow_and_keep_all_at_the_plain_peak():
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in "abcd"]
    model, x = nn.Sequential(*layers), torch.randn(8, 16, 32)
    frontier = recoup.plan(model, x)
    times = [point.relative_time for point in frontier.points]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] == pytest.approx(1.0)

    def plain_step():
        output = model(x)  # which the loop holds while backward runs
        output.abs().sum().backward()

    peak = recoup.measure(plain_step, device="cpu", repeats=0).peak_bytes
    assert frontier.points[-1].peak_bytes <= peak
    made = frontier.plan(peak)
    assert {row.way for row in made.blocks} == {"keep"}
    assert made.predicted_time_ratio == pytest.approx(1.0)
    assert made.step_seconds > 0


def test_both_panels_of_the_figure_say_the_same_time(monkeypatch, tmp_path):
    """The picture of the step ends where the picture of all plans has this one."""
    times = Times(plain=3.5, again=[0.5] * 6, share=0.0)  # runs again pay more than first
    monkeypatch.setattr(priced_blocks, "times_of", lambda *args, **kwargs: times)
    model, x = stack(), batch()
    made = plan(model, x, middle(model, x))
    assert made.predicted_time_ratio > 1
    drawn: list[Any] = []

    def rendered(draw, *args, **kwargs):
        panels = [MagicMock(), MagicMock()]
        draw(panels)
        drawn.extend(panels)
        return b""

    monkeypatch.setattr("recoup.planning.plan.rendered", rendered)
    monkeypatch.setattr("recoup.planning.plan.finish", lambda *args: None)
    made.figure(tmp_path / "plan.png")
    before, after = (call.args[0] for call in drawn[0].plot.call_args_list)
    (place,) = (call.args[1] for call in drawn[1].plot.call_args_list)
    assert before[-1] == pytest.approx(1.0)
    assert before == sorted(before)
    assert after == sorted(after)
    assert after[-1] == pytest.approx(float(place)) == pytest.approx(made.predicted_time_ratio)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_figure(tmp_path, suffix):
    model, x = stack(), batch()
    path = plan(model, x, middle(model, x)).figure(tmp_path / f"plan{suffix}")
    assert path.stat().st_size > 5000
    with pytest.raises(ValueError, match="must end in one of"):
        plan(model, x, "1 GiB").figure(tmp_path / "plan.txt")
