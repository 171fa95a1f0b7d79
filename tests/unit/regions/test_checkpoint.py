"""`recoup.checkpoint`: how a function may hold its modules, and the keywords of torch's."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections import OrderedDict
from types import MethodType, SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn
from torch.utils.flop_counter import FlopCounterMode

import recoup
from tests.oracle import assert_same_step, run_step
from tests.ways import assert_same
from tests.zoo import Fn, chain_of, leaf

NORM = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def trained(self, x):
    return self.norm(x).sin()


def of_a_global(model, call, x):
    NORM.load_state_dict(model.norms[0].state_dict())
    y = call(lambda x: NORM(x).sin(), x)
    model.norms[0].load_state_dict(NORM.state_dict())
    return y


CALLS = operator.call, recoup.checkpoint


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in "ab")

    def at(self, place, x):
        return self.norms[place](x)


WAYS = {
    "closures": lambda m, call, x: call(lambda x: m.at(1, x), call(lambda x: m.at(0, x), x)),
    "a module": lambda m, call, x: call(m.norms[1], call(lambda x: m.at(0, x), x)),
    "a method": lambda m, call, x: call(m.at, 1, call(m.at, 0, x)),
    "one alone": lambda m, call, x: call(m.norms[0].forward, x),
    "a list": lambda m, call, x: call(lambda x, group=[*m.norms]: group[0](x).sin(), x),
    "a partial": lambda m, call, x: call(functools.partial(operator.call, m.norms[0]), x),
    "an argument": lambda m, call, x: call(operator.call, m.norms[0], x),
    "an object": lambda m, call, x: call(MethodType(trained, SimpleNamespace(norm=m.norms[0])), x),
    "a global": of_a_global,
}


@pytest.mark.parametrize("way", WAYS)
def test_buffers_count_once_however_code_holds_its_modules(way):
    for _ in range(2):  # models, which share the code
        model, x = Norms(), leaf(8, 4).float()
        models = model, copy.deepcopy(model)
        for _ in range(3):
            for model, call in zip(models, CALLS, strict=True):
                WAYS[way](model, call, x).square().sum().backward()
            found = [[*each.buffers(), *(p.grad for p in each.parameters())] for each in models]
            assert_same(*found)


def attends(given, attention):
    return (attention(*given)[0].tanh(),) * 3


@pytest.mark.parametrize("how", ["arguments", "keywords", "parameters", "sqrt", "log", 1])
def test_a_tensor_that_is_given_twice_is_one_tensor_again(how):
    attention, other = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8)
    blocks, x = [Fn(attends, attention) for _ in range(4)], torch.randn(2, 3, 8)
    x = nn.Parameter(x) if how == "parameters" else x.requires_grad_()
    for query, key, value in ((x, x, x), (x, other, other), (other, x, other)):
        named = {"query": query, "key": key, "value": value}
        if how in ("sqrt", "log", 1):
            chains = nn.Sequential(*blocks), recoup.Sequential(*blocks, memory=how)
            made = [chain((query, key, value))[0] for chain in chains]
        elif how == "keywords":
            made = [call(attention, **named)[0] for call in CALLS]
        else:
            made = [call(attention, query, key, value)[0] for call in CALLS]
        found = [torch.autograd.grad(each.square().sum(), x) for each in made]
        assert torch.equal(*found[0], *found[1])


def test_keywords_of_torch_are_taken():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout()).double()
    given = {"use_reentrant": None, "preserve_rng_state": False, "determinism_check": "none"}
    given |= {"context_fn": noop_context_fn, "debug": False, "early_stop": False}
    x, call = leaf(3, 4), functools.partial(recoup.checkpoint, **given)
    assert_same_step(run_step(model, x, call=call), run_step(model, x))


@pytest.mark.parametrize("early_stop", [True, False])
def test_selective_checkpoints_run_products_once(early_stop):
    layers = nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    model, x, flops = nn.Sequential(*layers).double(), leaf(8, 64), []
    checkpoint = functools.partial(recoup.checkpoint, early_stop=early_stop)
    products = [torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, products)
    for call in (operator.call, checkpoint, functools.partial(checkpoint, context_fn=contexts)):
        with FlopCounterMode(display=False) as counter:
            assert_same_step(run_step(model, x, call=call), run_step(model, x))
        flops.append(counter.get_total_flops())
    assert flops[1] > flops[0] == flops[2]


ENDS = [(True, None, 1), (False, None, 2), (True, False, 2), (False, True, 1)]


@pytest.mark.parametrize(("early_stop", "within", "num_ends"), ENDS)
def test_where_the_second_run_ends(early_stop, within, num_ends):
    ends, set_it = [], torch.utils.checkpoint.set_checkpoint_early_stop
    fn = lambda x: (x.sin().exp(), ends.append(1))[0]  # noqa: E731
    with contextlib.nullcontext() if within is None else set_it(within):
        recoup.checkpoint(fn, leaf(100, 100), early_stop=early_stop).sum().backward()
    assert len(ends) == num_ends


@pytest.mark.parametrize("memory", ["sqrt", "log", 2])
def test_a_chain_that_grows_and_shrinks(memory):
    modules, x = chain_of("dropout")
    model = recoup.Sequential(OrderedDict(zip("012", modules[:3], strict=True)), memory=memory)
    model(x).sum().backward()
    model.extend(modules[3:])
    model.insert(0, nn.Tanh())
    assert_same_step(run_step(model, x), run_step(nn.Sequential(nn.Tanh(), *modules), x))
    del model[0]
    assert list(model.state_dict()) == list(nn.Sequential(*modules).state_dict())
    assert isinstance(model, nn.Sequential)
    assert model[1:4].memory == memory
    assert f"memory={memory!r}" in repr(model)
    assert recoup.Sequential(*modules, memory=memory, otherwise="keep")[:2].otherwise == "keep"
    assert recoup.Sequential(memory=memory)(x) is x
