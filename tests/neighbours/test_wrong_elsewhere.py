"""What a second run gets wrong elsewhere: a test for each row of docs/wrong_elsewhere.md."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs

import recoup
from recoup.errors import ChangedError, ReplayError
from tests.deciding import Grouped, Router, distance

RIGHT, WRONG = "right", "wrong"


def plainly(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def theirs(fn, *args, **kwargs):
    return torchs(fn, *args, use_reentrant=False, **kwargs)


def reentrant(fn, *args, **kwargs):
    return torchs(fn, *args, use_reentrant=True, **kwargs)


def outcome(step, run):
    """Whether a step has the gradients and states of the plain one, or the class of its error."""
    torch.manual_seed(0)
    expected = step(plainly)
    torch.manual_seed(0)
    try:
        found = step(run)
    except Exception as error:  # noqa: BLE001 - whatever others raise
        return type(error).__name__
    if [a is None for a in found] != [b is None for b in expected]:
        return WRONG
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    if any(a.shape != b.shape for a, b in pairs):
        return WRONG
    return RIGHT if distance(*map(list, zip(*pairs, strict=True))) < 1e-4 else WRONG


def leaf(*size):
    return torch.randn(*size).requires_grad_()


# -- decisions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "elsewhere"), [(Router, WRONG), (Grouped, "CheckpointError")])
def test_a_router_a_rounding_error_off(kind, elsewhere):
    def step(run):
        model, x = kind(), leaf(32, 16)
        run(model, x).square().sum().backward()
        return [x.grad, model.first.grad]

    assert outcome(step, theirs) == elsewhere
    assert outcome(step, recoup.checkpoint) == RIGHT


# -- what is counted -------------------------------------------------------------------------------


class CountsTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("tokens_per_expert", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x).sin()
        self.tokens_per_expert += torch.bincount(y.detach().argmax(-1), minlength=4)
        return y * (1 + self.tokens_per_expert.clone())


def test_what_a_module_counts():
    def step(run):
        model, x = CountsTokens(), leaf(3, 4)
        for _ in range(2):
            run(model, run(model, x)).square().sum().backward()
        return [x.grad, model.linear.weight.grad, model.tokens_per_expert]

    assert outcome(step, theirs) in (WRONG, "CheckpointError")
    assert outcome(step, recoup.checkpoint) == RIGHT


def sequence(memory):
    torch.manual_seed(0)
    stages = [CountsTokens() for _ in range(6)]
    model, x = recoup.Sequential(*stages, memory=memory), leaf(3, 4)
    for _ in range(2):
        model(x).square().sum().backward()
    return [x.grad, *model.buffers()]


@pytest.mark.parametrize("memory", ["sqrt", 1])
def test_what_stages_count(memory):
    torch.testing.assert_close(sequence(memory), sequence("linear"), rtol=0, atol=0)


def test_what_planned_blocks_count():
    def step(is_planned):
        torch.manual_seed(0)
        model, x = nn.Sequential(*(CountsTokens() for _ in range(6))), leaf(3, 4)
        if is_planned:
            budget = recoup.plan(model, x, budget="1 GiB").least_bytes
            recoup.plan(model, x, budget=budget).apply()
        for _ in range(2):
            model(x).square().sum().backward()
        return [x.grad, *model.buffers()]

    torch.testing.assert_close(step(is_planned=True), step(is_planned=False), rtol=0, atol=0)


def test_a_cache_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip

    def step(run):
        model, x = transformers.LlamaModel(config), leaf(2, 8, 16)
        cache = transformers.DynamicCache(config=config)
        kwargs = {
            "position_embeddings": model.rotary_emb(x, torch.arange(8)[None]),
            "attention_mask": None,
        }
        layer = model.layers[0]
        y = run(layer, x, past_key_values=cache, **kwargs)
        y.square().sum().backward()
        return [x.grad, cache.layers[0].keys.detach()]

    assert outcome(step, theirs) in (WRONG, "CheckpointError")  # which, is up to the release
    assert outcome(step, recoup.checkpoint) == RIGHT


def test_batch_norm():
    def step(run):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), leaf(8, 4)
        run(model, x).square().sum().backward()
        return [x.grad, model[1].running_mean, model[1].running_var]

    assert outcome(step, theirs) == WRONG
    assert outcome(step, recoup.checkpoint) == RIGHT


# -- what changes between forward and backward -----------------------------------------------------


def raises_changed(step):
    return outcome(step, recoup.checkpoint) in (ChangedError.__name__, ReplayError.__name__)


def test_a_loop_variable():
    def step(run):
        x = y = leaf(3)
        for scale in (1.0, 2.0, 3.0):
            y = run(lambda y: (y * scale).sin(), y)  # noqa: B023 - the mistake that is meant
        y.sum().backward()
        return [x.grad]

    assert outcome(step, theirs) == WRONG
    assert raises_changed(step)


@pytest.mark.parametrize("place", ["keyword", "list", "closure"])
def test_a_tensor_changed_in_place(place):
    def step(run):
        x, scale = leaf(3), torch.rand(3)
        if place == "keyword":
            y = run(lambda x, scale: (x * scale).sin(), x, scale=scale)
        elif place == "list":
            y = run(lambda x, scales: (x * scales[0]).sin(), x, [scale])
        else:
            y = run(lambda x: (x * scale).sin(), x)
        if run is not plainly:
            scale.mul_(2)
        y.sum().backward()
        return [x.grad]

    assert outcome(step, theirs) == WRONG
    assert raises_changed(step)


def test_a_weight_changed_in_place():
    def step(run):
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), leaf(2, 3)
        y = run(model, x)
        if run is not plainly:
            with torch.no_grad():
                model[0].weight.mul_(2)
        y.sum().backward()
        return [x.grad]

    assert outcome(step, theirs) == WRONG
    assert raises_changed(step)


# -- random numbers --------------------------------------------------------------------------------


def test_a_generator_of_its_own():
    def step(run):
        generator, x = torch.Generator().manual_seed(0), leaf(64)
        run(lambda x: (x * torch.rand(64, generator=generator)).sin(), x).sum().backward()
        return [x.grad]

    assert outcome(step, theirs) == WRONG
    assert outcome(step, recoup.checkpoint) == ReplayError.__name__


def test_random_of_python():
    def step(run):
        random.seed(0)
        x = leaf(3)
        run(lambda x: (x * random.random()).sin(), x).sum().backward()
        return [x.grad]

    assert outcome(step, theirs) == WRONG
    assert outcome(step, recoup.checkpoint) == ReplayError.__name__


def test_dropout_without_the_random_state():
    def step(run):
        x = leaf(64)
        more = {} if run is plainly else {"preserve_rng_state": False}
        run(lambda x: nn.functional.dropout(x.exp()), x, **more).sum().backward()
        return [x.grad]

    assert outcome(step, theirs) == WRONG
    assert outcome(step, recoup.checkpoint) == RIGHT


# -- the reentrant kind ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_an_input_without_a_gradient():
    def step(run):
        model, x = nn.Linear(3, 3), torch.randn(2, 3)
        y = run(model, x) + leaf(3)
        y.square().sum().backward()
        return [model.weight.grad]

    assert outcome(step, reentrant) == WRONG  # the weight has no gradient
    assert outcome(step, recoup.checkpoint) == RIGHT


def test_a_gradient_for_some_inputs():
    def step(run):
        x = leaf(3)
        return list(torch.autograd.grad(run(torch.sin, x).sum(), x))

    assert outcome(step, reentrant) == "RuntimeError"
    assert outcome(step, recoup.checkpoint) == RIGHT
