"""Regions in a compiled graph: the bytes that they promise, and the gradients of eager code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.invertible import AdditiveCoupling, Chain, Flip
from tests.alive import allocated_bytes

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
WIDTH, BATCH = 64, 16
UNIT = 4 * WIDTH * BATCH  # an activation
RANDOM_STATE = 5056

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*use_reentrant parameter.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def random_numbers_of_eager_code():
    """Let the optimizing backend draw the numbers that eager code draws."""
    from torch._inductor import config

    with config.patch(fallback_random=True):
        yield


@pytest.fixture
def weight():
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)


def step(call, x, parameters, seed=1):
    torch.manual_seed(seed)
    y = call(x)
    wanted = [x, *parameters]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted), torch.get_rng_state()]


def held_by(call, x):
    """The bytes that a forward leaves, the input with them, and its output not."""
    left = []
    return allocated_bytes(lambda: left.append(call(x.clone())))[1] - left[0].nbytes


def check(call, parameters, backend="aot_eager"):
    """Compare a step of `call` as one graph with one of eager code; return the bytes it holds."""
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for seed in range(2):
        got, want = step(compiled, x, parameters, seed), step(call, x, parameters, seed)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    return held_by(compiled, x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("by", ["function", "block"])
def test_a_noisy_weight_that_a_graph_computes_again(by, backend, weight):
    """R3: the input is held, and a random state at most."""

    def noisy():
        return weight + 0.1 * torch.randn_like(weight)

    def linear(x):
        if by == "function":
            value = recoup.recompute(noisy)()
        else:
            with recoup.recomputing():
                value = noisy()
        return torch.tanh(F.linear(x, value))

    assert check(linear, [weight], backend) <= UNIT + RANDOM_STATE
    assert check(lambda x: torch.tanh(F.linear(x, noisy())), [weight]) >= UNIT + weight.nbytes


def blocks():
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        for _ in range(6)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpointed_call(backend):
    model = nn.Sequential(*blocks())
    parameters = list(model.parameters())
    assert check(lambda x: recoup.checkpoint(model, x), parameters, backend) <= UNIT
    assert check(model, parameters) > 8 * UNIT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("memory", "num_units"), [("inputs", 5 + 3), ("sqrt", 3 + 3)])
def test_a_chain(memory, num_units, backend):
    """The inputs of the segments; the last one is not computed again. It holds its output, too."""
    model = recoup.Sequential(*blocks(), memory=memory)
    assert check(model, list(model.parameters()), backend) <= num_units * UNIT


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # a first run finds modules
def test_compiled_modules_in_a_chain():
    torch.manual_seed(0)
    modules, x = blocks(), torch.randn(BATCH, WIDTH, requires_grad=True)
    compiled = [torch.compile(module, backend="aot_eager") for module in modules]
    parameters = list(nn.Sequential(*modules).parameters())
    got = step(recoup.Sequential(*compiled, memory="sqrt"), x, parameters)
    for a, b in zip(got, step(nn.Sequential(*modules), x, parameters), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("memory", ["log", 2, "1 MiB"])
def test_a_chain_that_no_graph_can_hold_says_the_way_out(memory):
    model = recoup.Sequential(*blocks(), memory=memory)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    with pytest.raises(Exception, match=r'"inputs" and "sqrt"'):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("region", ["checkpoint", "recompute", "recomputing", "chain"])
def test_a_noisy_layer_within(region, backend):
    """R2c: with one draw, and one step."""
    seen = []
    layer = nn.Linear(WIDTH, WIDTH)
    recoup.weight_noise(layer, std=lambda number: seen.append(number) or 0.1)
    chain = recoup.Sequential(layer, nn.Tanh(), nn.Tanh(), memory="inputs")

    def call(x):
        match region:
            case "checkpoint":
                y = recoup.checkpoint(layer, x)
            case "recompute":
                y = recoup.recompute(layer)(x)
            case "recomputing":
                with recoup.recomputing():
                    y = layer(x)
            case _:
                y = chain(x)
        return y.tanh()

    seen.clear()
    assert check(call, list(layer.parameters()), backend) <= 4 * UNIT + 64
    assert seen == list(range(5))  # four compared steps, and one that was measured


def breaks(x):
    y = x * 2
    torch._dynamo.graph_break()
    return y.sin()


class Breaking(nn.Module):
    def forward(self, x):
        return breaks(x)


def breaking_block(x):
    with recoup.recomputing():
        return breaks(x)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: recoup.recompute(breaks)(x),
        breaking_block,
        lambda x: recoup.checkpoint(breaks, x),
        recoup.Sequential(*(Breaking() for _ in range(4)), memory="sqrt"),
        lambda x: Chain(AdditiveCoupling(Breaking()), Flip(), memory="constant")(x)[0],
    ],
    ids=["recompute", "recomputing", "checkpoint", "chain", "constant"],
)
def test_around_code_that_breaks_a_graph(call, weight):
    def linear(x):
        return F.linear(call(x + torch.randn_like(x)), weight).sin()

    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    compiled = torch.compile(linear, backend="aot_eager")
    for seed in range(2):
        got, want = step(compiled, x, [weight], seed), step(linear, x, [weight], seed)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
