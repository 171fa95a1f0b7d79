"""The frontier of a model: plans for several budgets from one measurement."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch

import recoup
from recoup.errors import BudgetError
from recoup.planning import compiling
from recoup.planning import frontier as frontier_module
from recoup.planning.verification import DifferentStepError
from tests.neighbours.planned import Net, give_steady_times, give_steps_times, loss_of
from tests.plan_oracle import assert_as_plain, between, step_of, ways_of


def of_net(num_blocks=5, **options):
    """A model, a step of it, its input, and its frontier."""
    torch.manual_seed(0)
    model, x = Net(32, num_blocks), torch.randn(64, 32)
    model.stem.eval()  # so that all steps are the same
    frontier = recoup.plan(model, x, loss=loss_of, **options)
    return model, step_of(model, x, loss=loss_of), x, frontier


def test_points_are_what_plans_take():
    _, _, _, frontier = of_net()
    points = frontier.points
    assert [point.peak_bytes for point in points] == sorted({p.peak_bytes for p in points})
    times = [point.relative_time for point in points]
    assert times == sorted(times, reverse=True)
    assert (points[-1].relative_time, points[-1].num_forwards) == (1.0, 5)
    assert points[0].peak_bytes <= frontier.least_bytes < 1.02 * points[0].peak_bytes
    plan = frontier.plan(points[-2].peak_bytes + 4096)  # a rehearsal may take a little more
    assert plan.predicted_peak_bytes == points[-2].peak_bytes
    assert sum(row.num_forwards for row in plan.blocks) == points[-2].num_forwards


def test_a_further_plan_runs_few_steps():
    model, _, _, frontier = of_net()
    budget, calls = between(frontier, 0.5), []
    model.stem.register_forward_hook(lambda *_: calls.append(1))
    frontier.plan(budget)
    assert len(calls) <= 4  # the plain step, the least, the planned one, and its time


def test_a_plan_after_training_is_compared_with_the_parameters_of_now():
    model, step, _, frontier = of_net()
    frontier.plan("1 GiB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert_as_plain(frontier.plan(between(frontier, 0.5)), step)


@pytest.mark.parametrize(
    "change", [lambda model: model.eval(), lambda model: model.requires_grad_(False)]
)
def test_another_state_of_the_model(change):
    model, _, _, frontier = of_net()
    change(model)
    with pytest.raises(ValueError, match="measured for another state of the Net"):
        frontier.plan("1 GiB")


def test_an_error_of_too_few_bytes_has_the_frontier_with_it():
    _, _, _, frontier = of_net()
    with pytest.raises(BudgetError) as info:
        frontier.plan(10)
    assert info.value.frontier is frontier
    sent = pickle.loads(pickle.dumps(info.value))
    assert (sent.least_bytes, sent.frontier) == (info.value.least_bytes, None)
    assert frontier.plan(info.value.least_bytes).rehearsed_peak_bytes


def test_the_table(tmp_path):
    _, _, _, frontier = of_net()
    title, _, head, *rows = str(frontier).splitlines()
    assert title.startswith("Plans for Net: 5 blocks, from ")
    assert head.split() == ["peak", "time", "forwards", "blocks"]
    assert 2 < len(rows) <= 12
    pytest.importorskip("matplotlib")
    assert frontier.figure(tmp_path / "frontier.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
class TestCompiled:
    """Frontiers with blocks that are compiled."""

    @pytest.fixture
    def of_compiled(self, monkeypatch):
        give_steady_times(monkeypatch)
        monkeypatch.setattr(frontier_module, "_CLOSE", 10.0)
        return of_net(num_blocks=3, compile="aot_eager")

    def test_blocks_are_measured_once(self, of_compiled, caplog, tmp_path):
        _, step, _, frontier = of_compiled
        assert True in {point.is_compiled for point in frontier.points}
        assert "compiled" in str(frontier)
        caplog.set_level(logging.INFO, logger=compiling.__name__)
        for share in (0.5, 1.0):
            plan = frontier.plan(between(frontier, share))
            assert any("compiled" in way for way in ways_of(plan))
            with plan.applied():
                peak = recoup.measure(step, device="cpu", repeats=0).peak_bytes
            assert peak <= plan.budget_bytes
        assert not [record for record in caplog.records if record.name == compiling.__name__]
        pytest.importorskip("matplotlib")
        frontier.figure(tmp_path / "frontier.png")

    def test_steps_of_both_kinds_are_timed_where_their_predictions_are_close(
        self, of_compiled, monkeypatch
    ):
        frontier, peaks = of_compiled[-1], {}
        for compiled, others in ((1.0, 2.0), (2.0, 1.0), (1.0, 1.01)):
            give_steps_times(monkeypatch, compiled=compiled, others=others)
            plan = frontier.plan("1 GiB")
            is_compiled = any("compiled" in way for way in ways_of(plan))
            peaks[is_compiled] = plan.rehearsed_peak_bytes
            assert is_compiled == (others > compiled) or others == 1.01
        assert set(peaks) == {True, False}
        assert plan.rehearsed_peak_bytes == min(peaks.values())  # of those about as fast

    def test_a_second_kind_that_computes_something_else_is_passed_over(
        self, of_compiled, monkeypatch
    ):
        verified = frontier_module.verified

        def other_fails(kind, *args):
            if kind.is_compiled:
                return verified(kind, *args)
            raise DifferentStepError("another")

        monkeypatch.setattr(frontier_module, "verified", other_fails)
        assert any("compiled" in way for way in ways_of(of_compiled[-1].plan("1 GiB")))
