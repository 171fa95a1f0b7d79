"""How often code is looked at for foreign generators, counted and not clocked (F7)."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import nn

import recoup
from recoup._core import random_sources as sources
from recoup.errors import ReplayError
from tests.zoo import leaf


@pytest.fixture
def looks(monkeypatch):
    """The names of the calls that were looked at."""
    found = []
    looking = sources._SourceCheck

    def counted(codes, generators, seen, name):
        found.append(name)
        return looking(codes, generators, seen, name)

    monkeypatch.setattr(sources, "_SourceCheck", counted)
    return found


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x, *, scale=1.0):
        return self.linear(x * scale).tanh()


class LikeTransformers(Layer):
    """Calls itself through a checkpoint function, as transformers does."""

    def __call__(self, *args, **kwargs):
        return recoup.checkpoint(functools.partial(super().__call__, **kwargs), *args)


class Callable:
    def __init__(self, fn):
        self.fn = fn

    def __call__(self, x):
        return self.fn(x)


def decorated(fn):
    @functools.wraps(fn)
    def call(x):
        return fn(x)

    return call


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


def sine(x):
    return x.sin()


def scaled(scale, x):
    return (x * scale).sin()


def made_anew(kind, layer):
    return {
        "function": lambda: sine,
        "builtin": lambda: torch.sin,
        "lambda": lambda: lambda x: layer(x),
        "partial": lambda: functools.partial(scaled, 2.0),
        "partial of a partial": lambda: functools.partial(functools.partial(layer, scale=2.0)),
        "method": lambda: layer.forward,
        "wrapper": lambda: decorated(layer),
        "object": lambda: Callable(functools.partial(layer)),
        "autograd function": lambda: Sine.apply,
    }[kind]


KINDS = [
    "function", "builtin", "lambda", "partial", "partial of a partial", "method", "wrapper",
    "object", "autograd function",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_anew_at_each_step_is_looked_at_once(kind, looks):
    """F7: a partial, a lambda or a wrapper is told by what it wraps."""
    layer = Layer()
    make = made_anew(kind, layer)
    want = torch.autograd.grad(make()(x := leaf(3, 4)).sum(), x)
    for _ in range(5):
        got = torch.autograd.grad(recoup.checkpoint(make(), x).sum(), x)
        assert torch.equal(got[0], want[0])
    assert len(looks) <= 1  # a builtin may have been looked at by another test


def test_a_layer_that_passes_a_partial_of_its_super_call_is_looked_at_once(looks):
    """F7, as transformers calls its checkpoint function; each layer once, and in each mode."""
    layers = nn.Sequential(*[LikeTransformers() for _ in range(3)])
    x = leaf(3, 4)
    for _ in range(4):
        layers(x).sum().backward()
    assert len(looks) == 3
    layers.eval()
    for _ in range(4):
        layers(x).sum().backward()
    assert len(looks) == 6


def by_two_wrappers(fn):
    return decorated(decorated(fn))


@pytest.mark.parametrize("wrap", [decorated, by_two_wrappers, Callable, functools.partial])
def test_one_wrapper_around_two_functions_is_looked_at_for_each(wrap):
    recoup.checkpoint(wrap(sine), leaf(4))
    with pytest.raises(ReplayError, match=r"Python's `random`"):
        recoup.checkpoint(wrap(lambda x: (x * random.random()).sin()), leaf(4))


def test_a_function_as_an_argument_is_looked_at():
    def call(fn, x):
        return fn(x)

    recoup.checkpoint(call, sine, leaf(4))
    with pytest.raises(ReplayError, match=r"Python's `random`"):
        recoup.checkpoint(call, lambda x: (x * random.random()).sin(), leaf(4))


def drawn(x, generator=None):
    return (x * torch.rand(4, generator=generator, dtype=x.dtype)).sin()


def test_a_generator_that_only_a_later_call_is_given():
    recoup.checkpoint(drawn, leaf(4))
    recoup.checkpoint(drawn, leaf(4), torch.default_generator)
    for call in (
        lambda: recoup.checkpoint(drawn, leaf(4), torch.Generator()),
        lambda: recoup.checkpoint(functools.partial(drawn, generator=torch.Generator()), leaf(4)),
        lambda: recoup.checkpoint(torch.bernoulli, leaf(4), generator=torch.Generator()),
    ):
        with pytest.raises(ReplayError, match=r"a torch.Generator of its own"):
            call()


@pytest.mark.parametrize("kind", ["Random", "Generator", "RandomState"])
def test_a_generator_in_a_closure_that_is_not_of_torch(kind):
    if kind == "Random":
        draw = random.Random(0).random
    else:
        numpy = pytest.importorskip("numpy").random
        draw = (numpy.default_rng(0) if kind == "Generator" else numpy.RandomState(0)).normal
    with pytest.raises(ReplayError, match=r"of its own"):
        recoup.checkpoint(lambda x: (x * float(draw())).sin(), leaf(4))


def test_a_generator_that_the_first_run_makes_and_does_not_use():
    class Lazy(Layer):
        def __init__(self):
            super().__init__()
            self.shuffle = random.Random(0)
            self.sample = None

        def forward(self, x):
            self.__dict__.pop("shuffle", None)
            self.sample = self.sample or random.Random(1)
            return super().forward(x)

    recoup.checkpoint(Lazy(), leaf(3, 4)).sum().backward()
