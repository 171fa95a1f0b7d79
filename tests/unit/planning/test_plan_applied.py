"""Plans that are applied, found again, replaced and removed."""

from __future__ import annotations

import abc
import copy
import functools
import pickle
from types import MethodType

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from tests.plan_oracle import Made, Residual, assert_as_plain, peak_of, square, stack, step_of
from tests.planned_zoo import is_plain


def batch():
    return torch.ones(64, 32)


def plan(model, x, budget="1 GiB", **options):
    return recoup.plan(model, x, budget=budget, loss=square, **options)


def test_a_further_plan_replaces_the_one_of_before_when_it_is_applied():
    model, x = stack(), batch()
    first = plan(model, x).apply()
    least = first.least_bytes
    with plan(model, x, least).applied() as inner:
        assert recoup.applied_plans(model) == [inner]
    again = plan(model, x, least)
    assert again.most_bytes == first.most_bytes  # made as if none were applied
    assert recoup.applied_plans(model) == [first]
    again.apply()
    assert recoup.applied_plans(model) == [again]
    assert not first.is_applied
    with pytest.raises(BudgetError):
        plan(model, x, 1)
    assert again.is_applied
    assert peak_of(model, step_of(model, x)) <= least
    first.remove()  # takes nothing of another's away
    assert recoup.applied_plans(model) == [again]
    again.remove()
    assert is_plain(model)


@pytest.mark.filterwarnings("ignore:The first step")  # which has the other part, too
def test_two_plans_for_parts_of_a_model():
    model = Made(lambda m, x: m.decoder(m.encoder(x)), encoder=stack(3), decoder=stack(3))
    x = batch()
    one, two = plan(model.encoder, x).apply(), plan(model.decoder, x).apply()
    assert recoup.applied_plans(model) == [one, two]
    assert recoup.applied_plans(model.encoder) == [one]
    three = plan(model.decoder, x, two.least_bytes).apply()
    step_of(model, x)()
    assert [each.is_applied for each in (one, two, three)] == [True, False, True]
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
    made, again = plan(other, x), plan(model, x).apply()
    with pytest.raises(ValueError, match="plan of another model"):
        made.apply()
    assert recoup.applied_plans(other) == [again]


def test_the_plan_of_a_chain_is_made_again_if_it_is_taken_off_and_goes_with_the_chain():
    layers, x = [Residual() for _ in range(3)], batch()
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
    plan(model := nn.Sequential(*layers), x).apply()
    assert len(recoup.applied_plans(model)) == 1


# -- forwards, copies and classes of others --------------------------------------------------------


def test_a_plan_beneath_a_forward_that_others_wrapped_as_accelerate_does_is_found():
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


Abstract = abc.ABCMeta("Abstract", (abc.ABC, Residual), {})  # another base comes first


def test_forwards_that_other_code_binds_to_a_module_or_sets_on_its_class():
    model, x = stack(4, Abstract), batch()
    wanted = model(x)
    with plan(model, x).applied() as applied:
        kind = type(model[0])
        forward = kind.forward
        kind.forward = lambda self, *args: forward(self, *args)
        kind.forward = forward
        model.forward = MethodType(model.forward, model)
        assert torch.equal(model(x), wanted)
        applied.remove()
        assert torch.equal(model(x), wanted)
    del model.forward
    assert all(type(each) is Abstract for each in model)
    again = recoup.plan(model, x, loss=square)
    assert_as_plain(again.plan(again.least_bytes), step_of(model, x))


def test_a_shallow_copy_runs_its_own_forward():
    for copied in (nn.Module._replicate_for_data_parallel, lambda m: copy.deepcopy(copy.copy(m))):
        model, x = stack(2), batch()
        made = plan(model, x).apply()
        other, parts = copied(model), nn.Sequential(nn.Linear(32, 5), nn.Tanh())
        vars(other)["_modules"] = dict(parts.named_children())
        assert torch.equal(other(x), parts(x))
        assert made.is_applied
        made.remove()
        assert type(model) is nn.Sequential
        assert torch.equal(other(x), parts(x))


@pytest.mark.parametrize("replan", [False, True])
def test_a_pickle_of_a_planned_model_loads_without_recoup(replan):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(16, 4)
    model[2].forward = functools.partial(nn.Linear.forward, model[2])  # as other libraries do
    wanted = model(x)
    plan(model, x, replan=replan).apply()
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        data = pickle.dumps(model, protocol)
        assert b"recoup" not in data
        assert torch.equal(pickle.loads(data)(x), wanted)


def test_classes_that_change_their_subclasses_do_not_hear_of_plans():
    told = []

    class Told(Residual):
        def __init_subclass__(cls, name):
            told.append(name)

    model, x = stack(3, Told), batch()
    with plan(model, x).applied():
        assert len({type(each) for each in model}) == 1

        class Patched(type(model[0]), name="patched"):
            pass

        step_of(model, x)()
    assert told == ["patched"]
    assert is_plain(model)

    class Abstract(abc.ABC, Told, name="abstract"):  # of another layout in memory
        pass

    with pytest.raises(ValueError, match="`__init_subclass__` defaults"):
        plan(stack(3, Abstract), x)
