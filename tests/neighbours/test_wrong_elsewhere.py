"""What a second run gets wrong elsewhere: a step for each row of docs/wrong_elsewhere.md."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs

import recoup
from tests.deciding import Grouped, Router, distance
from tests.zoo import CountsTokens

RIGHT, WRONG, ERROR = "right", "wrong", "error"


def plainly(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def theirs(fn, *args, **kwargs):
    return torchs(fn, *args, use_reentrant=False, **kwargs)


def reentrant(fn, *args, **kwargs):
    return torchs(fn, *args, use_reentrant=True, **kwargs)


def outcome(step, run):
    """Whether a step has the gradients and states of the plain one, or raises an error."""
    torch.manual_seed(0)
    expected = step(plainly)
    torch.manual_seed(0)
    try:
        found = step(run)
    except RuntimeError:  # of torch and of recoup
        return ERROR
    if [a is None for a in found] != [b is None for b in expected]:
        return WRONG
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    if any(a.shape != b.shape for a, b in pairs):
        return WRONG
    return RIGHT if distance(*map(list, zip(*pairs, strict=True))) < 1e-4 else WRONG


def leaf(*size):
    return torch.randn(*size).requires_grad_()


def a_module(build, *size):
    """A step of a module, with the buffers that it changes."""

    def step(run):
        model, x = build(), leaf(*size)
        run(model, x).square().sum().backward()
        states = [each for each in model.buffers() if each.is_floating_point()]
        return [x.grad, *(p.grad for p in model.parameters()), *states]

    return step


def a_function(fn, size=64, change=None, **options):
    """A step of a function of its input and a tensor, which `change` changes before backward."""

    def step(run):
        random.seed(0)
        x, scale = leaf(size), torch.rand(size)
        given = {} if run is plainly else options
        y = run(lambda x: fn(x, scale), x, **given)
        if change is not None and run is not plainly:
            change(scale)
        y.sum().backward()
        return [x.grad]

    return step


def a_cache_of_transformers(run):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model, x = transformers.LlamaModel(config), leaf(2, 8, 16)
    cache = transformers.DynamicCache(config=config)
    positions = model.rotary_emb(x, torch.arange(8)[None])
    more = {"position_embeddings": positions, "attention_mask": None, "past_key_values": cache}
    run(model.layers[0], x, **more).square().sum().backward()
    return [x.grad, cache.layers[0].keys.detach()]


def a_loop_variable(run):
    x = y = leaf(3)
    for scale in (1.0, 2.0, 3.0):
        y = run(lambda y: (y * scale).sin(), y)  # noqa: B023 - the mistake that is meant
    y.sum().backward()
    return [x.grad]


def a_tensor_in(*place):
    def step(run):
        x, scale = leaf(3), torch.rand(3)
        if place == ("keyword",):
            y = run(lambda x, scale: (x * scale).sin(), x, scale=scale)
        else:
            y = run(lambda x, scales: (x * scales[0]).sin(), x, [scale])
        if run is not plainly:
            scale.mul_(2)
        y.sum().backward()
        return [x.grad]

    return step


def a_weight_changed_in_place(run):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), leaf(2, 3)
    y = run(model, x)
    if run is not plainly:
        with torch.no_grad():
            model[0].weight.mul_(2)
    y.sum().backward()
    return [x.grad]


def a_generator_of_its_own(run):
    generator, x = torch.Generator().manual_seed(0), leaf(64)
    run(lambda x: (x * torch.rand(64, generator=generator)).sin(), x).sum().backward()
    return [x.grad]


def an_input_without_a_gradient(run):
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    (run(model, x) + leaf(3)).square().sum().backward()
    return [model.weight.grad]


def a_gradient_for_some_inputs(run):
    x = leaf(3)
    return list(torch.autograd.grad(run(torch.sin, x).sum(), x))


def norm():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


ROWS = {  # the step, what it is elsewhere, and what it is here
    "a router a rounding error off": (a_module(Router, 32, 16), theirs, WRONG, RIGHT),
    "a router, expert by expert": (a_module(Grouped, 32, 16), theirs, ERROR, RIGHT),
    "what a module counts": (a_module(CountsTokens, 3, 6), theirs, (WRONG, ERROR), RIGHT),
    "a cache of transformers": (a_cache_of_transformers, theirs, (WRONG, ERROR), RIGHT),
    "batch norm": (a_module(norm, 8, 4), theirs, WRONG, RIGHT),
    "a loop variable": (a_loop_variable, theirs, WRONG, ERROR),
    "a changed keyword": (a_tensor_in("keyword"), theirs, WRONG, ERROR),
    "a changed list": (a_tensor_in("list"), theirs, WRONG, ERROR),
    "a changed closure": (
        a_function(lambda x, s: (x * s).sin(), change=lambda s: s.mul_(2)), theirs, WRONG, ERROR
    ),
    "a changed weight": (a_weight_changed_in_place, theirs, WRONG, ERROR),
    "a generator of its own": (a_generator_of_its_own, theirs, WRONG, ERROR),
    "random of python": (
        a_function(lambda x, _: (x * random.random()).sin()), theirs, WRONG, ERROR
    ),
    "dropout without the random state": (
        a_function(lambda x, _: nn.functional.dropout(x.exp()), preserve_rng_state=False),
        theirs, WRONG, RIGHT,
    ),
    "an input without a gradient": (an_input_without_a_gradient, reentrant, WRONG, RIGHT),
    "a gradient for some inputs": (a_gradient_for_some_inputs, reentrant, ERROR, RIGHT),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("row", ROWS)
def test_what_is_wrong_elsewhere(row):
    step, others, elsewhere, here = ROWS[row]
    assert outcome(step, others) in elsewhere
    assert outcome(step, recoup.checkpoint) == here
