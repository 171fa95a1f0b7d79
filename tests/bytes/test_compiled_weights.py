"""Law 2 for reparametrized weights in compiled graphs: what a forward leaves, by the allocator.

NOTE [ What is compared with what ]

Rule 1. A compiled model with noise, dropout or norms may hold what the plain one holds, compiled in
        the same way, and 64 bytes a weight: whatever part of the activations the compiler is told
        to save, on each backend.
Rule 2. The input counts: a partitioner may save something else of its size instead.
Rule 3. A weight whose noise is computed by plain operators must break the law.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

import recoup
from tests.alive import allocated_bytes

BYTES_A_WEIGHT = 64
PATTERN = ".*weight.*"
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]

pytestmark = [
    pytest.mark.usefixtures("measured", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.fixture(params=[1.0, 0.5, 0.0])
def budget(request):
    """How much of the activations the compiler may save."""
    with config.patch(activation_memory_budget=request.param):
        yield request.param


def few_budgets():
    """All budgets, one of them marked as exhaustive."""
    return [pytest.param(1.0, marks=pytest.mark.exhaustive), 0.5, 0.0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Tied(nn.Module):
    """An embedding whose table is the weight of the decoder, too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids):
        return self.decoder(self.embedding(ids).tanh())


class Unrolled(nn.Module):
    """A cell over time: many reads of each weight."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(64, 64)

    def forward(self, x):
        h = torch.zeros_like(x)
        for _ in range(3):
            h = self.cell(x, h)
        return h


def linear():
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())


def convolutions():
    return nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Tanh())


KINDS = {
    "linear": (linear, lambda: torch.randn(4, 64)),
    "conv": (convolutions, lambda: torch.randn(2, 8, 8, 8)),
    "attention": (Attention, lambda: torch.randn(2, 5, 64)),
    "embedding": (Tied, lambda: torch.randint(512, (3, 4))),
    "cell": (Unrolled, lambda: torch.randn(2, 64)),
}
APPLIED = {
    "noise": lambda module: recoup.weight_noise(module, PATTERN, std=0.1),
    "dropout": lambda module: recoup.weight_dropout(module, PATTERN),
    "norm": lambda module: recoup.weight_norm(module, PATTERN),
    "all": lambda module: recoup.weight_noise(
        recoup.weight_dropout(recoup.weight_norm(module, PATTERN), PATTERN), PATTERN, std=0.1
    ),
}


def held_by(call, x):
    """The bytes that a forward leaves, beside its output."""
    call(x.clone()).float().sum().backward()  # compiles
    gc.collect()
    left = []
    return allocated_bytes(lambda: left.append(call(x.clone())))[1] - left[0].nbytes


def num_weights(module):
    named = module.named_parameters(remove_duplicate=False)
    return sum("weight" in name and not name.endswith("_g") for name, _ in named)


def beyond_the_law(build, apply, x, backend, **more):
    """How many bytes more a compiled module holds than it may."""
    plain, noisy = build(), apply(build())
    held = [held_by(torch.compile(module, backend=backend, **more), x) for module in (plain, noisy)]
    return held[1] - held[0] - BYTES_A_WEIGHT * num_weights(noisy)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("applied", APPLIED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_graph_holds_no_weight(kind, applied, budget):
    build, given = KINDS[kind]
    assert beyond_the_law(build, APPLIED[applied], given(), "aot_eager", fullgraph=True) <= 0


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("budget", few_budgets(), indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_nor_does_what_the_optimizing_backend_compiles(kind, budget):
    build, given = KINDS[kind]
    assert beyond_the_law(build, APPLIED["all"], given(), "inductor", fullgraph=True) <= 0


class UnderAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_under_autocast_a_compiled_graph_holds_no_weight(backend, budget):
    x = torch.randn(4, 64)
    assert beyond_the_law(UnderAutocast, APPLIED["all"], x, backend, fullgraph=True) <= 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_recurrent_layers_hold_no_weight(backend):
    """The graph breaks there, and the layer runs as in eager code."""

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.lstm = nn.Linear(64, 64), nn.LSTM(64, 64)

        def forward(self, x):
            return self.lstm(self.before(x).tanh())[0]

    assert beyond_the_law(Between, APPLIED["noise"], torch.randn(3, 2, 64), backend) <= 0


class Checkpointed(UnderAutocast):
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_within_a_checkpoint_of_torch(backend, budget):
    x = torch.randn(4, 64, requires_grad=True)
    assert beyond_the_law(Checkpointed, APPLIED["noise"], x, backend, fullgraph=True) <= 0


def test_noise_by_plain_operators_breaks_the_law():
    """See Rule 3."""

    class Noisy(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight * (1 + torch.randn_like(self.weight)))

    def apply(module):
        return nn.Sequential(Noisy(64, 64), module[1], Noisy(64, 64), module[3])

    assert beyond_the_law(linear, apply, torch.randn(4, 64), "aot_eager") > 64 * 64 * 4


def test_seeds_are_drawn_once_whatever_the_budget(budget):
    """R2b: a budget of 0 computed the draw of the seeds again, in backward."""
    seeds = []
    module = recoup.weight_noise(nn.Linear(8, 8), std=0.1)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 8, requires_grad=True)
    for _ in range(2):
        state = torch.get_rng_state()
        y = compiled(x)
        seeds.append(torch.get_rng_state())
        y.sum().backward()
        assert torch.equal(torch.get_rng_state(), seeds[-1])
        assert not torch.equal(state, seeds[-1])
    assert recoup.weights.applied(module)[0].step == 2
