"""Plans that are applied, found again, replaced and removed (N9)."""

from __future__ import annotations

import abc
import copy
import functools
import gc
import logging
import pickle
import subprocess
import sys
from types import MethodType
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from tests.plan_oracle import Made, Residual, assert_as_plain, peak_of, square, stack, step_of
from tests.planned_zoo import is_plain


def batch():
    return torch.ones(64, 32)


def plan(model, x, budget="1 GiB"):
    return recoup.plan(model, x, budget=budget, loss=square)


def test_one_line_of_log_says_what_the_model_follows(caplog):
    model, x = stack(2), batch()
    made = plan(model, x)
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


def test_a_further_plan_replaces_the_one_of_before_when_it_is_applied():
    """A notebook runs `recoup.plan(...).apply()` twice: plans are made as if none were applied."""
    model, x = stack(), batch()
    first = plan(model, x).apply()
    least = first.least_bytes
    with plan(model, x, least).applied() as inner:
        assert recoup.applied_plans(model) == [inner]
    assert recoup.applied_plans(model) == [first]
    for budget in ("1 GiB", least):
        again = plan(model, x, budget)
        assert again.most_bytes == first.most_bytes
        assert recoup.applied_plans(model) != [again], "nothing changes before apply()"
        again.apply()
        assert recoup.applied_plans(model) == [again]
    assert not first.is_applied
    with pytest.raises(BudgetError):
        plan(model, x, 1)
    assert again.is_applied
    assert peak_of(model, step_of(model, x)) <= least
    first.remove()  # it is no longer there, and takes nothing of another's away
    assert recoup.applied_plans(model) == [again]
    with again.applied():
        pass
    assert is_plain(model)


@pytest.mark.filterwarnings("ignore:The first step")  # which has the other part, too
def test_two_plans_for_parts_of_a_model():
    model = Made(lambda m, x: m.decoder(m.encoder(x)), encoder=stack(), decoder=stack())
    x = batch()
    one, two = plan(model.encoder, x).apply(), plan(model.decoder, x).apply()
    assert recoup.applied_plans(model) == [one, two]
    assert recoup.applied_plans(model.encoder) == [one]
    plan(model.decoder, x, two.least_bytes).apply()
    assert one.is_applied
    assert not two.is_applied
    step_of(model, x)()
    for each in recoup.applied_plans(model):
        each.remove()
    assert is_plain(model)


def test_a_plan_over_blocks_of_another_model_names_the_way_out():
    model, x = stack(2), batch()
    plan(model, x).apply()
    other = nn.Sequential(*model)
    with pytest.raises(ValueError, match=r"plan of another model.*Sequential.*applied_plans"):
        plan(other, x)
    for each in recoup.applied_plans(other):
        each.remove()
    made = plan(other, x)
    again = plan(model, x).apply()
    with pytest.raises(ValueError, match="plan of another model"):
        made.apply()
    assert recoup.applied_plans(other) == [again]


def test_the_plan_of_a_chain_is_made_again_if_it_is_taken_off_and_goes_with_the_chain():
    layers, x = [Residual() for _ in range(6)], batch()
    chain = recoup.Sequential(*layers, memory="1 MiB")
    for _ in range(2):  # a chain with a budget does not run without one, silently
        step_of(chain, x)()
        (found,) = recoup.applied_plans(chain)
        found.remove()
    step_of(chain, x)()
    with pytest.raises(ValueError, match='memory="linear"'):
        plan(nn.Sequential(*layers), x)
    (found,) = recoup.applied_plans(chain)
    chain.memory = "linear"
    assert not found.is_applied
    assert is_plain(chain)
    chain.memory = "1 MiB"
    step_of(chain, x)()
    del chain, found
    model = nn.Sequential(*layers)
    plan(model, x).apply()
    assert len(recoup.applied_plans(model)) == 1
    gc.collect()


def test_a_plan_beneath_a_forward_that_others_wrapped_is_found():
    """As accelerate wraps `forward` and sets `__wrapped__`."""
    model, x = stack(), batch()
    planned = plan(model, x).apply()
    ours = model.forward
    wrapped = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
    model.forward = wrapped
    assert recoup.applied_plans(model) == [planned]
    again = plan(model, x, planned.least_bytes).apply()
    assert recoup.applied_plans(model) == [again]
    assert peak_of(model, step_of(model, x)) <= planned.least_bytes
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


SHALLOW = {
    "copy": copy.copy,
    "DataParallel": nn.Module._replicate_for_data_parallel,
    "deepcopy of a copy": lambda model: copy.deepcopy(copy.copy(model)),
}


@pytest.mark.parametrize("how", SHALLOW)
def test_a_shallow_copy_runs_its_own_forward(how):
    model, x = stack(2), batch()
    made = plan(model, x).apply()
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
for data in pickle.load(sys.stdin.buffer):
    model, x, wanted = pickle.loads(data)
    model(x).sum().backward()
    assert model[0].weight.grad.equal(wanted)
    assert all("_recoup" not in name for each in model.modules() for name in vars(each))
"""


def test_a_pickle_of_a_planned_model_loads_without_recoup():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(16, 4)
    model[2].forward = functools.partial(nn.Linear.forward, model[2])  # as other libraries do
    model(x).sum().backward()
    wanted, found = model[0].weight.grad, []
    model.zero_grad()
    for replan in (False, True):
        recoup.plan(model, x, budget="1 GiB", replan=replan).apply()
        given = (model, x, wanted)
        found += [pickle.dumps(given, protocol) for protocol in (2, pickle.HIGHEST_PROTOCOL)]
    command = [sys.executable, "-c", WITHOUT_RECOUP]
    subprocess.run(command, input=pickle.dumps(found), check=True)


def test_a_forward_that_other_code_sets_on_the_class_of_a_planned_module():
    """As a counter of calls does, and puts it back: later plans are followed."""
    model, x = stack(4), batch()
    with plan(model, x).applied():
        kind = type(model[0])
        forward = kind.forward
        kind.forward = lambda self, *args: forward(self, *args)
        kind.forward = forward
    again = recoup.plan(model, x, loss=square)
    assert_as_plain(again.plan(again.least_bytes), step_of(model, x))


def test_classes_do_not_hear_of_plans():
    """A class may change the subclasses that it is told of, or ask them for arguments."""
    told = []

    class Told(Residual):
        def __init_subclass__(cls, name):
            told.append(name)

    model, x = stack(3, Told), batch()
    with plan(model, x).applied():

        class Patched(type(model[0]), name="patched"):
            pass

        step_of(model, x)()
    assert told == ["patched"]
    assert is_plain(model)


class Abstract(abc.ABC, Residual):
    pass


class Typed(Generic[TypeVar("T")], Residual):
    pass


@pytest.mark.parametrize("kind", [Abstract, Typed])
def test_classes_with_another_base_before_that_of_modules(kind):
    model, x = stack(4, kind), batch()
    found = recoup.plan(model, x, loss=square)
    assert_as_plain(found.plan(found.least_bytes), step_of(model, x))
    with plan(model, x).applied():
        assert len({type(each) for each in model}) == 1
    assert all(type(each) is kind for each in model)


def test_a_forward_that_other_code_binds_to_its_module():
    """As accelerate does where it takes a model out of its wrapper."""
    model, x = stack(4), batch()
    wanted = model(x)
    with plan(model, x).applied() as applied:
        model.forward = MethodType(model.forward, model)
        assert torch.equal(model(x), wanted)
        applied.remove()
        assert torch.equal(model(x), wanted)
