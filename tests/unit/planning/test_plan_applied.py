"""Plans that are applied, found again, replaced and removed (N9)."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from tests.planned_zoo import is_plain
from tests.unit.planning.test_plan import Residual, batch, peak_of, plan, stack, step


class Pair(nn.Module):
    """Two stacks, each with its plan."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = stack(), stack()

    def forward(self, x):
        return self.decoder(self.encoder(x))


def sizes_of(plan) -> list[object]:
    """Return the costs of a plan without their times, which are measured."""
    nothing = {"seconds": 0.0}
    return [
        replace(
            cost,
            **nothing,
            invert_seconds=0.0,
            offload_seconds=None,
            variants=tuple(replace(tape, **nothing) for tape in cost.variants),
            results=tuple(replace(each, **nothing) for each in cost.results),
            again=cost.again and replace(cost.again, **nothing),
        )
        for cost in plan.costs
    ]


def test_one_line_of_log_says_what_the_model_follows(caplog):
    model, x = stack(2), batch()
    made = plan(model, x, "1 GiB")
    with caplog.at_level(logging.INFO, logger="recoup"):
        made.apply()
        made.apply()  # it follows it already
        with made.applied():
            pass
        made.remove()
    assert [record.getMessage() for record in caplog.records] == [
        f"{made!r}".replace("; not applied)", "; applied)")
    ]
    assert caplog.records[0].name == "recoup.planning.plan"


@pytest.mark.slow
def test_a_cell_that_is_run_again_replaces_its_plan():
    """N9: a notebook runs `recoup.plan(...).apply()` twice, and keeps no handle."""
    model, x = stack(), batch()
    first = plan(model, x, "1 GiB").apply()
    least = first.least_bytes
    for budget in (least, "1 GiB", least):
        plan(model, x, budget).apply()
        assert len(recoup.applied_plans(model)) == 1
    assert not first.is_applied
    assert peak_of(model, x) <= least
    first.remove()  # it is no longer there, and takes nothing of another's away
    (found,) = recoup.applied_plans(model)
    assert found.budget_bytes == least
    found.remove()
    assert is_plain(model)


@pytest.mark.slow
def test_a_plan_is_made_as_if_none_were_applied():
    """N9"""
    model, x = stack(), batch()
    wanted = plan(model, x, "1 GiB")
    applied = plan(model, x, wanted.least_bytes).apply()
    again = plan(model, x, "1 GiB")
    assert sizes_of(again) == sizes_of(wanted)
    assert again.rehearsed_peak_bytes == wanted.rehearsed_peak_bytes
    assert applied.is_applied, "nothing changes before apply()"
    with pytest.raises(BudgetError):
        plan(model, x, 1)
    assert applied.is_applied
    assert peak_of(model, x) <= wanted.least_bytes


def test_after_a_context_the_plan_of_before_is_there_again():
    """N9"""
    model, x = stack(), batch()
    outer = plan(model, x, "1 GiB").apply()
    inner = plan(model, x, outer.least_bytes)
    with inner.applied():
        assert recoup.applied_plans(model) == [inner]
    assert recoup.applied_plans(model) == [outer]
    with outer.applied():
        pass
    assert is_plain(model)


@pytest.mark.filterwarnings("ignore:The first step")  # which has the other part, too
def test_two_plans_for_parts_of_a_model():
    """N9"""
    model, x = Pair(), batch()
    one = plan(model.encoder, x, "1 GiB").apply()
    two = plan(model.decoder, x, "1 GiB").apply()
    assert recoup.applied_plans(model) == [one, two]
    assert recoup.applied_plans(model.encoder) == [one]
    plan(model.decoder, x, two.least_bytes).apply()
    assert one.is_applied
    assert not two.is_applied
    step(model, x)
    for each in recoup.applied_plans(model):
        each.remove()
    assert is_plain(model)


@pytest.mark.slow
def test_a_plan_over_blocks_of_another_model_names_the_way_out():
    """N9"""
    model, x = stack(), batch()
    plan(model, x, "1 GiB").apply()
    other = nn.Sequential(*model)
    with pytest.raises(ValueError, match=r"plan of another model.*Sequential.*applied_plans"):
        plan(other, x, "1 GiB")
    for each in recoup.applied_plans(other):
        each.remove()
    made = plan(other, x, "1 GiB")
    again = plan(model, x, "1 GiB").apply()
    with pytest.raises(ValueError, match="plan of another model"):
        made.apply()
    assert recoup.applied_plans(other) == [again]


def test_the_plan_of_a_chain_that_died_is_released():
    """N9"""
    layers, x = [Residual() for _ in range(6)], batch()
    chain = recoup.Sequential(*layers, memory="1 MiB")
    step(chain, x)
    assert len(recoup.applied_plans(chain)) == 1
    del chain
    model = nn.Sequential(*layers)
    plan(model, x, "1 GiB").apply()
    assert len(recoup.applied_plans(model)) == 1
    gc.collect()


@pytest.mark.slow
def test_the_plan_of_a_chain_that_is_taken_off_is_made_again():
    """N9: a chain with a budget does not run without one, silently."""
    torch.manual_seed(0)
    chain, x = recoup.Sequential(*(Residual() for _ in range(6)), memory="1 MiB"), batch()
    step(chain, x)
    recoup.applied_plans(chain)[0].remove()
    step(chain, x)
    (found,) = recoup.applied_plans(chain)
    with pytest.raises(ValueError, match='memory="linear"'):
        plan(nn.Sequential(*chain), x, "1 GiB")
    chain.memory = "linear"
    assert not found.is_applied
    assert is_plain(chain)


def test_a_plan_beneath_a_forward_that_others_wrapped_is_found():
    """N9: accelerate wraps `forward` and sets `__wrapped__`."""
    model, x = stack(), batch()
    planned = plan(model, x, "1 GiB").apply()
    ours = model.forward

    @functools.wraps(ours)
    def wrapped(*args, **kwargs):
        return ours(*args, **kwargs)

    model.forward = wrapped
    assert recoup.applied_plans(model) == [planned]
    again = plan(model, x, planned.least_bytes).apply()
    assert recoup.applied_plans(model) == [again]
    assert peak_of(model, x) <= planned.least_bytes
    again.remove()
    assert model.forward is wrapped


@pytest.mark.parametrize("is_first", [True, False])
def test_a_lack_of_memory_names_the_way_out(is_first):
    model, x = stack(), batch()
    least = recoup.plan(model, x).least_bytes
    with recoup.plan(model, x, budget=least).applied():
        parts = [module for module in model.modules() if isinstance(module, nn.Linear)]
        remaining = iter(range(0 if is_first else len(parts)))

        def runs_out(*_):
            if next(remaining, None) is None:
                raise torch.OutOfMemoryError("no room")

        for part in parts:
            part.register_forward_pre_hook(runs_out)
        with pytest.raises(torch.OutOfMemoryError, match="no room") as caught:
            model(x).sum().backward()
    (note,) = caught.value.__notes__
    assert "let a plan leave more `headroom`, or set" in note


def in_a_subclass(model: nn.Module) -> nn.Module:
    """Copy a model as `higher` does: into a subclass, attribute by attribute."""
    kind = type(model)

    class Patched(kind):
        pass

    Patched.forward = lambda self, *args: kind.forward(self, *args)
    other = Patched.__new__(Patched)
    for name, value in vars(model).items():
        object.__setattr__(other, name, value)
    return other


def test_a_forward_that_other_code_sets_on_the_class_of_a_planned_module():
    """As a counter of calls does, and puts it back: later plans are followed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.Tanh()) for _ in range(1)))
    model.extend(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))
    x = torch.randn(16, 8)
    with recoup.plan(model, x, budget="1 GiB", loss=torch.sum).applied():
        kind = type(model[0])
        forward = kind.forward
        kind.forward = lambda self, *args: forward(self, *args)
        kind.forward = forward
    assert recoup.plan(model, x, loss=torch.sum).least_bytes > 0


SHALLOW = {
    "copy": copy.copy,
    "DataParallel": nn.Module._replicate_for_data_parallel,
    "higher": in_a_subclass,
    "deepcopy of a copy": lambda model: copy.deepcopy(copy.copy(model)),
}


@pytest.mark.parametrize("how", SHALLOW)
def test_a_shallow_copy_runs_its_own_forward(how):
    model, x = stack(), batch()
    made = plan(model, x, "1 GiB").apply()
    other, parts = SHALLOW[how](model), [nn.Linear(32, 5), nn.Tanh()]
    vars(other)["_modules"] = {str(place): part for place, part in enumerate(parts)}
    wanted = nn.Sequential(*parts)(x)
    assert torch.equal(other(x), wanted)
    assert made.is_applied
    made.remove()
    assert type(model) is nn.Sequential
    assert torch.equal(other(x), wanted)


WITHOUT_RECOUP = """
import pickle, sys
sys.modules["recoup"] = None
model, x, wanted = pickle.load(sys.stdin.buffer)
model(x).sum().backward()
assert model[0].weight.grad.equal(wanted)
assert all("_recoup" not in name for each in model.modules() for name in vars(each))
"""


@pytest.mark.parametrize("replan", [False, True])
def test_a_pickle_of_a_planned_model_loads_without_recoup(replan):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(16, 4)
    model[2].forward = functools.partial(nn.Linear.forward, model[2])  # as other libraries do
    model(x).sum().backward()
    wanted = model[0].weight.grad
    model.zero_grad()
    recoup.plan(model, x, budget="1 GiB", replan=replan).apply()
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        data = pickle.dumps((model, x, wanted), protocol)
        subprocess.run([sys.executable, "-c", WITHOUT_RECOUP], input=data, check=True)


def test_classes_do_not_hear_of_plans():
    """A class may change the subclasses that it is told of, or ask them for arguments."""
    told = []

    class Told(Residual):
        def __init_subclass__(cls, name):
            told.append(name)

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Told() for _ in range(3))), batch()
    with plan(model, x, "1 GiB").applied():

        class Patched(type(model[0]), name="patched"):
            pass

        step(model, x)
    assert told == ["patched"]
    assert is_plain(model)
