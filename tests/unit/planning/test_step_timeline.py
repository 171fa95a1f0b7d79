"""`recoup.timeline`: the bytes of the meter, and the module and the way of each event."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import recoup
from recoup.flows import NICE
from tests.plan_oracle import between, peak_of, square, stack, step_of
from tests.zoo import conv_norm, transformer


def chain(num=6, hidden=64):
    layers = lambda: (nn.Linear(32, hidden), nn.GELU(), nn.Linear(hidden, 32))  # noqa: E731
    return stack(num, lambda: nn.Sequential(*layers())), torch.randn(64, 32)


def told(model, x, share, **options):
    frontier = recoup.plan(model, x, loss=square, **options)
    plan = frontier.plan(between(frontier, share))
    found = recoup.timeline(model, x, plan=plan, loss=square)
    assert found.planned.peak_bytes == plan.rehearsed_peak_bytes
    return plan, found


def modules_that(what, timeline):
    return [each.module for each in timeline.stretches if each.what == what]


def test_the_most_bytes_are_those_of_the_meter_and_of_the_plan_and_no_trace_is_left():
    model, x = stack(5, conv_norm), torch.randn(4, 3, 12, 12)
    step = step_of(model, x)
    step()
    gradients, values = ([p.grad for p in model.parameters()], [*model.buffers()])
    before = [each.clone() for each in (*gradients, *values)]
    stream = torch.get_rng_state()
    plan, found = told(model, x, 0.5)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(map(torch.equal, (*gradients, *values), before))
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks
    assert found.plain.peak_bytes == peak_of(model, step_of(model, x))
    with plan.applied():
        assert found.planned.peak_bytes == peak_of(model, step_of(model, x))
    assert found.plain.levels("backward")[-1] <= found.plain.levels("backward")[0]
    assert found.budget_bytes == plan.budget_bytes


def test_modules_are_those_in_which_autograd_saved():
    model, x = chain(2)
    saved = {each.module for each in recoup.residuals(lambda: square(model(x)))}
    found = recoup.timeline(model, x, loss=square).plain
    forward = {each.module for each in found.stretches if each.phase == "forward" and each.levels}
    backward = {each.module for each in found.stretches if each.phase == "backward"}
    assert saved == forward == backward == {"0.0", "0.1", "0.2", "1.0", "1.1", "1.2", "-"}
    whats = [*dict.fromkeys(each.what for each in found.stretches)]
    assert whats == ["forward", "loss", "backward", "backward of the loss"]
    assert {each.way for each in found.stretches} == {""}
    order = [each.module for each in found.stretches if each.phase == "backward" and each.levels]
    assert list(dict.fromkeys(order)) == ["-", *(f"{i}.{j}" for i in (1, 0) for j in (2, 1, 0))]
    first = [e.levels for e in found.stretches if (e.module, e.what) == ("0.0", "forward")]
    assert first == [(64 * 64 * 4,)]


def test_blocks_that_run_again_say_so_as_often_as_planned():
    plan, found = told(*chain(9, hidden=8), 0)
    again = modules_that("runs again", found.planned)
    for block in plan.blocks:
        assert again.count(f"{block.name}.1") == block.num_forwards - 1, block
    assert max(block.num_forwards for block in plan.blocks) > 2
    ways = {e.module.partition(".")[0]: e.way for e in found.planned.stretches if "." in e.module}
    assert ways == {block.name: block.way for block in plan.blocks}
    plan, found = told(stack(3, transformer), torch.randn(4, 16, 8), 0.5)
    keeping = {block.name for block in plan.blocks if block.way == "keep products"}
    again = {*modules_that("runs again", found.planned)}
    assert keeping
    assert keeping <= again  # what is in no module within the block, as well
    assert all(name.partition(".")[0] in keeping for name in again)


def test_inverted_blocks_are_inverted():
    torch.manual_seed(0)
    flow, x = NICE((1, 4, 4), levels=None, width=16), torch.randn(512, 1, 4, 4)
    flow(x)  # where each ActNorm starts
    loss = lambda found: found[1].sum() + square(found[0][0])  # noqa: E731
    plans = recoup.plan(flow, x, loss=loss, exact=False)
    plan = plans.plan(plans.least_bytes)
    found = recoup.timeline(flow, x, plan=plan, loss=loss).planned
    names = {block.name for block in plan.blocks if block.way == "invert"}
    assert names
    inverses = {(each, name) for each in modules_that("inverse", found) for name in names
                if each.startswith(name)}  # fmt: skip
    assert {name for _, name in inverses} == names
    assert {each for each, _ in inverses} == {*modules_that("inverse", found)}
    assert found.peak_bytes == plan.rehearsed_peak_bytes


def test_the_plan_that_the_model_follows_is_found_and_a_total_counts_what_stands():
    model, x = chain()
    plan, found = told(model, x, 0.5, budget_of="total")
    assert found.plain.peak_bytes == plan.baseline_bytes + peak_of(model, step_of(model, x))
    with plan.applied():
        again = recoup.timeline(model, x, loss=square)
        assert plan.is_applied
    assert again.plain.peak_bytes > again.planned.peak_bytes == found.planned.peak_bytes


def test_mistakes_name_the_way_out_and_leave_no_hooks():
    model, x = chain(2)
    other = recoup.plan(chain(2)[0], x, budget="1 MiB")
    for words, plan in (("for a `budget`", recoup.plan(model, x)), ("another model", other)):
        with pytest.raises(ValueError, match=words):
            recoup.timeline(model, x, plan=plan)
    with pytest.raises(RuntimeError, match="shapes"):
        recoup.timeline(model, torch.randn(3, 7))
    with pytest.raises(ValueError, match=r"must end in .html"):
        recoup.timeline(model, x).page("step.svg")
    assert not torch_module._global_forward_hooks


def test_a_notebook_shows_the_page_in_a_frame_and_a_file_has_it(tmp_path):
    model, x = chain(2)
    _, found = told(model, x, 0.5)
    page = found.page(tmp_path / "step.html").read_text(encoding="utf-8")
    words = "Memory over a step of Sequential", "Plan for Sequential: 2 blocks", 'id="line1"'
    assert all(each in page for each in words)
    shown = found._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert shown.count("<") == 2
    assert str(found).splitlines()[0].split() == ["peak", "as", "it", "is", "planned"]
