"""`recoup.timeline`: the bytes of the meter, and the module and the way of each event."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import recoup
from recoup.__main__ import main
from recoup.flows import NICE
from tests.neighbours.planned import Net, give_steady_times, loss_of
from tests.planned_zoo import transformers_or_skip
from tests.unit.planning.test_plan_tiles import batch, gpt2

DOCS = Path(__file__).parents[3] / "docs"


def square(y):
    return y.square().mean()


def chain(num=6, width=32, hidden=64):
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        for _ in range(num)
    ]
    return nn.Sequential(*blocks), torch.randn(64, width)


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(32))

    def forward(self, x):
        return (x @ self.weight).exp().sin()


def convolutions():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.2), nn.ReLU())
        for _ in range(5)
    ]
    return nn.Sequential(*blocks), torch.randn(4, 8, 12, 12)


def layers():
    torch.manual_seed(0)
    kind = nn.TransformerEncoderLayer
    return nn.Sequential(*(kind(32, 4, 64, batch_first=True) for _ in range(4))), torch.randn(
        4, 16, 32
    )


def measured(model, x, loss=square):
    """The meter's peak of a step that begins without gradients, and holds the output."""

    def step():
        output = model(x)
        loss(output).backward()

    model.zero_grad()
    peak = recoup.measure(step, repeats=0).peak_bytes
    model.zero_grad()
    return peak


@pytest.mark.sampled(1)
@pytest.mark.parametrize("build", [chain, convolutions, layers])
def test_the_most_bytes_are_those_of_the_meter_and_of_the_plan(build):
    model, x = build()
    whole = recoup.plan(model, x, loss=square)
    plan = whole.plan((whole.points[0].peak_bytes + whole.points[-1].peak_bytes) // 2)
    found = recoup.timeline(model, x, plan=plan, loss=square)
    assert found.plain.peak_bytes == measured(model, x)
    assert found.planned.peak_bytes == plan.rehearsed_peak_bytes
    with plan.applied():
        assert found.planned.peak_bytes == measured(model, x)
    assert found.plain.levels("backward")[-1] <= found.plain.levels("backward")[0]
    assert found.budget_bytes == plan.budget_bytes


def test_modules_are_those_in_which_autograd_saved():
    model, x = chain(2)
    saved = {each.module for each in recoup.residuals(lambda: square(model(x)))}
    found = recoup.timeline(model, x, loss=square).plain
    forward = {each.module for each in found.stretches if each.phase == "forward" and each.levels}
    backward = {each.module for each in found.stretches if each.phase == "backward"}
    assert saved == {"0.0", "0.1", "0.2", "1.0", "1.1", "1.2", "-"}
    assert forward == saved
    assert backward == saved
    whats = dict.fromkeys(each.what for each in found.stretches)
    assert list(whats) == ["forward", "loss", "backward", "backward of the loss"]
    assert {each.way for each in found.stretches if each.module != "-"} == {"keep"}


def test_an_allocation_is_that_of_the_module_that_made_it():
    model, x = chain(1)
    found = recoup.timeline(model, x, loss=square).plain
    (made,) = [
        each.levels for each in found.stretches if each.module == "0.0" and each.what == "forward"
    ]
    assert list(made) == [64 * 64 * 4]
    backward = [each for each in found.stretches if each.phase == "backward" and each.levels]
    assert list(dict.fromkeys(each.module for each in backward)) == ["-", "0.2", "0.1", "0.0"]


def test_every_event_of_the_allocator_is_there():
    """As another profiler of torch sees them."""
    model, x = chain(2)
    found = recoup.timeline(model, x, loss=square).plain
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True) as profiler:
        output = model(x)
        square(output).backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    running = list(itertools.accumulate(sizes))
    levels = [*found.levels("forward"), *found.levels("backward")]
    shared = len(running) - 3  # what a step lets go of at its end comes in another order
    assert shared > 50
    assert levels[:shared] == running[:shared]


def test_blocks_that_run_again_say_so_as_often_as_planned():
    model, x = chain(12, hidden=8)
    frontier = recoup.plan(model, x, loss=square)
    plan = frontier.plan(frontier.least_bytes)
    found = recoup.timeline(model, x, plan=plan, loss=square).planned
    again = [each.module for each in found.stretches if each.what == "runs again"]
    for block in plan.blocks:
        assert again.count(f"{block.name}.1") == block.num_forwards - 1, block
    assert max(block.num_forwards for block in plan.blocks) > 2
    ways = {
        each.module.partition(".")[0]: each.way for each in found.stretches if "." in each.module
    }
    assert ways == {block.name: block.way for block in plan.blocks}


def test_blocks_without_modules_in_them_run_again_by_name():
    model, x = nn.Sequential(*(Leaf() for _ in range(6))), torch.randn(256, 32)
    frontier = recoup.plan(model, x, loss=square)
    plan = frontier.plan(frontier.least_bytes)
    found = recoup.timeline(model, x, plan=plan, loss=square).planned
    again = [each.module for each in found.stretches if each.what == "runs again"]
    assert again
    assert set(again) == {block.name for block in plan.blocks if block.num_forwards > 1}


def test_blocks_that_keep_products_run_the_rest_again():
    model, x = layers()
    whole = recoup.plan(model, x, loss=square)
    plan = whole.plan((whole.points[0].peak_bytes + whole.points[-1].peak_bytes) // 2)
    found = recoup.timeline(model, x, plan=plan, loss=square).planned
    keeping = {block.name for block in plan.blocks if block.way == "keep products"}
    again = {each.module for each in found.stretches if each.what == "runs again"}
    assert keeping
    assert keeping <= again  # what is in no module within the block, as well
    assert all(name.partition(".")[0] in keeping for name in again)


def test_inverted_blocks_are_inverted():
    torch.manual_seed(0)
    flow, x = NICE((1, 4, 4), levels=None, width=16), torch.randn(512, 1, 4, 4)
    flow(x)  # where each ActNorm starts
    options = {"loss": lambda found: found[1].sum() + square(found[0][0]), "exact": False}
    whole = recoup.plan(flow, x, budget="1 GiB", **options)
    budget = next(point.peak_bytes for point in whole.frontier if point.num_inverses)
    plan = recoup.plan(flow, x, budget=budget, **options)
    found = recoup.timeline(flow, x, plan=plan, loss=options["loss"])
    inverses = {each.module for each in found.planned.stretches if each.what == "inverse"}
    names = [block.name for block in plan.blocks if block.way == "invert"]
    assert inverses
    assert all(any(each.startswith(name) for name in names) for each in inverses)
    assert found.planned.peak_bytes == plan.rehearsed_peak_bytes


@pytest.mark.slow
def test_parts_in_tiles_are_told():
    model, (tokens, labels) = gpt2(), batch()
    plan = recoup.plan(model, tokens, labels=labels, budget="6 MiB", tiles=True)
    found = recoup.timeline(model, tokens, labels=labels, plan=plan)
    assert found.planned.peak_bytes == plan.rehearsed_peak_bytes
    assert {each.way for each in found.planned.stretches if each.module == "lm_head"} == {
        "keep, tile"
    }


@pytest.mark.slow
def test_a_page_of_a_gpt2_of_twelve_layers_is_small(tmp_path):
    transformers = transformers_or_skip()
    config = transformers.GPT2Config(n_embd=64, n_head=4, vocab_size=512, use_cache=False)
    model, tokens = transformers.GPT2LMHeadModel(config), torch.randint(512, (2, 64))
    frontier = recoup.plan(model, tokens, labels=tokens)
    plan = frontier.plan(frontier.least_bytes)
    found = recoup.timeline(model, tokens, labels=tokens, plan=plan)
    assert len(plan.blocks) == 12
    assert found.planned.peak_bytes == plan.rehearsed_peak_bytes
    assert found.page(tmp_path / "step.html").stat().st_size < 500_000


@pytest.mark.slow
def test_offloaded_blocks_are_told(tmp_path):
    model, x = chain(8, 256)
    least = recoup.plan(model, x, offload_to=tmp_path, loss=square).least_bytes
    plan = recoup.plan(model, x, budget=least, offload_to=tmp_path, loss=square)
    found = recoup.timeline(model, x, plan=plan, loss=square).planned
    ways = {
        each.module.partition(".")[0]: each.way for each in found.stretches if "." in each.module
    }
    assert ways == {block.name: block.way for block in plan.blocks}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_compiled_blocks_are_told_and_compiled_no_second_time(monkeypatch):
    give_steady_times(monkeypatch)
    torch.manual_seed(0)
    model, x = Net(32, 4), torch.randn(64, 32)
    model.stem.eval()  # so that all steps are the same
    plan = recoup.plan(model, x, budget="330 KiB", compile="aot_eager", loss=loss_of)
    assert any(block.way.startswith("recompute, compiled") for block in plan.blocks)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = recoup.timeline(model, x, plan=plan, loss=loss_of).planned
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled > 0
    assert found.peak_bytes == plan.rehearsed_peak_bytes
    forward = {each.module: each.way for each in found.stretches if each.what == "forward"}
    again = {each.module for each in found.stretches if each.what == "runs again"}
    assert all(forward[block.name] == block.way for block in plan.blocks)
    assert again == {block.name for block in plan.blocks if block.way.startswith("recompute")}


def test_under_a_profiler_of_other_code_spans_are_drawn():
    model, x = chain(2)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, acc_events=True):  # 2.11 warns without that
        with pytest.warns(UserWarning, match="A profiler runs in this thread"):
            found = recoup.timeline(model, x, loss=square).plain
        with pytest.warns(UserWarning, match="A profiler runs in this thread"):
            peak = measured(model, x)
    assert found.peak_bytes == peak
    (made,) = [each for each in found.stretches if each.module == "0.0" and each.what == "forward"]
    assert made.levels == (64 * 64 * 4, 64 * 64 * 4)
    gradients = sum(each.nbytes for each in model.parameters())
    assert gradients <= found.levels("backward")[-1] <= gradients + x.nbytes + 4


def test_the_ways_of_values_without_a_plan():
    model, x = chain(1)
    recoup.recompute_(model, nn.GELU)
    found = recoup.timeline(model, x, loss=square).plain
    ways = {each.module: each.way for each in found.stretches if each.what == "forward"}
    assert ways["0.0"] == "keep"
    assert "recompute" in ways.values()


def test_the_budget_counts_what_stands_before_a_step():
    model, x = chain()
    plan = recoup.plan(model, x, budget="1 MiB", budget_of="total", loss=square)
    found = recoup.timeline(model, x, plan=plan, loss=square)
    assert plan.baseline_bytes > 0
    assert found.planned.peak_bytes == plan.rehearsed_peak_bytes
    assert found.plain.peak_bytes == plan.baseline_bytes + measured(model, x)


def test_the_plan_that_the_model_follows_is_found_and_still_followed():
    model, x = chain()
    plan = recoup.plan(model, x, budget="200 KiB", loss=square).apply()
    found = recoup.timeline(model, x, loss=square)
    assert plan.is_applied
    assert found.planned.peak_bytes == plan.rehearsed_peak_bytes
    assert found.plain.peak_bytes > found.planned.peak_bytes
    plan.remove()


def test_of_a_family_it_is_the_plan_that_serves_the_arguments():
    (model, x), larger = chain(), torch.randn(200, 32)
    budget = 2 * recoup.plan(model, larger, loss=square).points[0].peak_bytes
    plan = recoup.plan(model, x, budget=budget, loss=square, replan=True)
    with plan.applied():
        with pytest.raises(ValueError, match="Run a training forward"):
            recoup.timeline(model, torch.randn(4096, 32), loss=square)
        square(model(larger)).backward()
        found = recoup.timeline(model, larger, loss=square)
        assert found.planned.peak_bytes <= budget
        assert found.planned.peak_bytes == measured(model, larger)


def test_a_step_leaves_no_trace():
    model, x = convolutions()
    square(model(x)).backward()
    before = {name: (value, value.clone()) for name, value in model.state_dict().items()}
    gradients = [(each.grad, each.grad.clone()) for each in model.parameters()]
    state = torch.get_rng_state()
    plan = recoup.plan(model, x, budget="200 KiB", loss=square)
    recoup.timeline(model, x, plan=plan, loss=square)
    assert all(torch.equal(now, then) for now, then in before.values())
    assert all(
        each.grad is now for each, (now, _) in zip(model.parameters(), gradients, strict=True)
    )
    assert all(torch.equal(now, then) for now, then in gradients)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks


def test_an_error_in_the_model_leaves_no_hooks():
    model, x = chain()
    with pytest.raises(RuntimeError, match="shapes"):
        recoup.timeline(model, torch.randn(3, 7), loss=square)
    assert not torch_module._global_forward_hooks
    assert recoup.timeline(model, x, loss=square).plain.peak_bytes == measured(model, x)


def test_a_frontier_is_no_plan():
    model, x = chain()
    with pytest.raises(ValueError, match="for a `budget`"):
        recoup.timeline(model, x, plan=recoup.plan(model, x))


def test_mistakes_name_the_way_out():
    model, x = chain()
    other, _ = chain()
    plan = recoup.plan(other, x, budget="1 MiB", loss=square)
    with pytest.raises(ValueError, match="`plan` is for another model, a Sequential"):
        recoup.timeline(model, x, plan=plan, loss=square)
    with pytest.raises(ValueError, match="`model` is a str, but must be"):
        recoup.timeline("model", x)
    with pytest.raises(ValueError, match=r'ends in ".svg", but must end in .html'):
        recoup.timeline(model, x, loss=square).page("step.svg")


def test_a_notebook_shows_the_page_in_a_frame():
    model, x = chain(2)
    found = recoup.timeline(model, x, loss=square)
    shown = found._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert shown.count("<") == 2
    assert str(found).splitlines()[0].split() == ["peak", "as", "it", "is"]


def test_the_command_of_the_docs_writes_the_page(tmp_path, monkeypatch, capsys):
    command = re.search(r"^recoup (explain .* --html .*)$", (DOCS / "plans.md").read_text(), re.M)[
        1
    ]
    (tmp_path / "models.py").write_text(
        "import torch\n"
        "def build():\n"
        "    layers = [torch.nn.Linear(8, 8) for _ in range(4)]\n"
        "    return torch.nn.Sequential(*layers), torch.ones(2, 8)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    assert capsys.readouterr().out.endswith("timeline: step.html\n")
    text = (tmp_path / "step.html").read_text(encoding="utf-8")
    assert "Memory over a step of Sequential" in text
    assert "Plan for Sequential: 4 blocks" in text


def test_the_command_without_a_budget_shows_the_step_as_it_is(tmp_path, capsys):
    (tmp_path / "models.py").write_text(
        "import torch\n"
        "def build():\n"
        "    layers = [torch.nn.Linear(8, 8) for _ in range(4)]\n"
        "    return torch.nn.Sequential(*layers), torch.ones(2, 8)\n"
    )
    page = tmp_path / "step.html"
    assert main(["explain", f"{tmp_path}/models.py:build", "--html", str(page)]) == 0
    assert 'id="line0"' in page.read_text(encoding="utf-8")
    assert 'id="line1"' not in page.read_text(encoding="utf-8")
    capsys.readouterr()
    for option, file, message in (
        ("--html", "step.png", "must end in .html"),
        ("--html", str(tmp_path), "must end in .html"),
        ("--figure", "step.gif", "must end in one of .png"),
    ):
        assert main(["explain", f"{tmp_path}/models.py:build", option, file]) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        assert not printed.out  # nothing was planned before


def test_there_is_no_step_in_inference_mode():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(2, 8)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"torch\.inference_mode"):
        recoup.timeline(model, x)


class Elsewhere(nn.Sequential):
    def get_submodule(self, target):
        raise AttributeError(target)


def test_a_model_with_its_own_lookup_of_submodules():
    model = Elsewhere(*(nn.Linear(8, 8) for _ in range(3)))
    x = torch.ones(2, 8)
    recoup.timeline(model, x, plan=recoup.plan(model, x, budget="1 MiB"))
