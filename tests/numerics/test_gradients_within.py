"""Gradients that code takes by itself while a region runs first: forces, penalties (F9)."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import nn

import recoup
from recoup._core.storage_tracking import StorageTracker
from tests.zoo import leaf


class Energy(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, 1)
        self.norm = nn.BatchNorm1d(width)
        self.double()

    def forward(self, x):
        return self.down(torch.dropout(self.norm(self.up(x)).tanh(), 0.3, True).sin())


class Detached(nn.Module):
    """The force at a copy of its input: asks for nothing of what came before."""

    def __init__(self, width=6):
        super().__init__()
        self.energy, self.after = Energy(width), nn.Linear(width, width).double()

    def forward(self, x):
        z = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(z).sum(), z, create_graph=True)
        return self.after((x.sin() - 0.1 * force).tanh())


class Own(Detached):
    """The force at its own input, after the region has saved other things."""

    def forward(self, x):
        h = self.after(x).tanh()
        (force,) = torch.autograd.grad(self.energy(h).sum(), h, create_graph=True)
        (again,) = torch.autograd.grad((h * force).sum(), x, create_graph=True)
        return (h.sin() - 0.1 * force).tanh() + again


class NoGraph(Detached):
    """A step downhill that nothing differentiates through."""

    def forward(self, x):
        z = x.detach().requires_grad_()
        self.energy(z).sum().backward(inputs=[z])
        return self.after((x.sin() - 0.1 * z.grad).tanh())


class Nested(Detached):
    def forward(self, x):
        return recoup.checkpoint(super().forward, x.sin()).cos()


KINDS = [Detached, Own, NoGraph, Nested]


def recomputing(block, x):
    with recoup.recomputing():
        y = block(x)
    return y.sin()


def in_sequence(memory):
    def run(blocks, x):
        return recoup.Sequential(*blocks, memory=memory)(x)

    return run


def each(call):
    def run(blocks, x):
        for block in blocks:
            x = call(block, x)
        return x

    return run


WAYS = {
    "checkpoint": each(recoup.checkpoint),
    "checkpoint of a lambda": each(lambda block, x: recoup.checkpoint(lambda x: block(x), x)),
    "checkpoint twice": each(
        lambda block, x: recoup.checkpoint(lambda x: recoup.checkpoint(block, x).sin(), x)
    ),
    "recompute": each(lambda block, x: recoup.recompute(block)(x).sin()),
    "recomputing": each(recomputing),
    "one region": lambda blocks, x: recoup.checkpoint(each(lambda b, x: b(x)), list(blocks), x),
    **{f"Sequential {m}": in_sequence(m) for m in ("sqrt", "log", 1)},
}
PLAIN = {
    "checkpoint twice": each(lambda block, x: block(x).sin()),
    "recompute": each(lambda block, x: block(x).sin()),
    "recomputing": each(lambda block, x: block(x).sin()),
}


def step(run, blocks, x):
    """Everything that a step with a second derivative leaves behind."""
    for value in (x, *blocks.parameters()):
        value.grad = None
    for name, buffer in blocks.named_buffers():
        buffer.fill_(1 if "var" in name else 0)
    torch.manual_seed(7)
    y = run(blocks, x)
    first = torch.autograd.grad(y.sin().sum(), x, create_graph=True, retain_graph=True)[0]
    (first.square().sum() + y.sum()).backward()
    grads = [value.grad for value in (x, *blocks.parameters())]
    return [y.detach(), *grads, *[b.clone() for b in blocks.buffers()], torch.rand(2)]


def assert_same(got, want):
    for a, b in itertools.zip_longest(got, want):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_the_plain_run(way, kind):
    """F9: bitwise, with dropout and norms inside, three times (the first run is special)."""
    torch.manual_seed(0)
    blocks, x = nn.ModuleList(kind() for _ in range(3)), leaf(5, 6)
    want = step(PLAIN.get(way, each(lambda block, x: block(x))), blocks, x)
    for _ in range(3):
        assert_same(step(WAYS[way], blocks, x), want)


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Detached, Own])
def test_in_planned_blocks(kind):
    """F9"""
    torch.manual_seed(0)
    model, x = Net(kind), leaf(64, 6)

    def gradients():
        model.zero_grad()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()
        torch.manual_seed(7)
        y = model(x)
        y.sin().sum().backward()
        return [y.detach(), *[p.grad for p in model.parameters()], *model.buffers()]

    want = [t.clone() for t in gradients() if t is not None]
    most = recoup.plan(model, x, budget="1 GiB")
    for share in (0.0,):
        budget = int(most.least_bytes + share * (most.most_bytes - most.least_bytes))
        try:
            plan = recoup.plan(model, x, budget=budget)
        except recoup.errors.BudgetError as error:  # the least may be a little more
            plan = recoup.plan(model, x, budget=error.least_bytes)
        plan.apply()
        try:
            for _ in range(2):
                assert_same([t for t in gradients() if t is not None], want)
        finally:
            plan.remove()


class Coupling(recoup.invertible.InvertibleModule):
    """Adds a force to one half."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def force(self, a):
        with torch.enable_grad():
            z = a.detach().requires_grad_()
            return torch.autograd.grad(self.energy(z).sum(), z, create_graph=True)[0]

    def forward(self, x):
        a, b = x.chunk(2, 1)
        return torch.cat((b + self.force(a), a), 1), x.new_zeros(len(x))

    def inverse(self, y):
        b, a = y.chunk(2, 1)
        return torch.cat((a, b - self.force(a)), 1), y.new_zeros(len(y))


def test_in_constant_memory():
    """F9"""
    torch.manual_seed(0)
    chain, x = recoup.invertible.Chain(*[Coupling() for _ in range(4)]), leaf(5, 6)

    def gradients(memory):
        chain.memory = memory
        out = chain(x)[0].sin().sum()
        return torch.autograd.grad(out, [x, *chain.parameters()], allow_unused=True)

    for _ in range(2):
        got, want = gradients("constant"), gradients("linear")
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_code_that_takes_its_first_gradient_late():
    """F9"""
    net, x, late = Energy(), leaf(5, 6), [False]

    def fn(x):
        if not late[0]:
            return net(x)
        z = x.detach().requires_grad_()
        return x * torch.autograd.grad(net(z).sum(), z, create_graph=True)[0]

    def gradients(call):
        torch.manual_seed(1)
        return torch.autograd.grad(call().sin().sum(), [x, *net.parameters()], allow_unused=True)

    for late[0] in (False, True):
        assert_same(gradients(lambda: recoup.checkpoint(fn, x)), gradients(lambda: fn(x)))


@pytest.mark.slow
def test_no_residual_is_held_after_the_first_run():
    """F9"""
    x = leaf(64, 64)
    unit = x.numel() * x.element_size()

    def silent(x):
        for _ in range(8):
            x = x.sin()
        return x

    def asking(x):
        z = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(silent(z).sum(), z)
        return x.sin() * g

    for fn in (silent, asking):
        for _ in range(2):
            gc.collect()
            with StorageTracker() as tracker:
                y = recoup.checkpoint(fn, x)
                held = tracker.current_bytes
            y.sum().backward()
            assert held // unit == 1
            assert fn is asking or tracker.peak_bytes // unit < 8
