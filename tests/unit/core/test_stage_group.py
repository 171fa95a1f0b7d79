"""Stages that run as one region: the plain run's numbers, and errors that name one stage."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import ChangedError, ReplayError
from recoup.invertible import ActNorm, Chain, Flip, InvertibleConv1x1
from recoup.schedules import Advance, Drop, Keep, Load, Reverse, Schedule, Tape


def step_of(model, x):
    """The gradients of a step, and the buffers after it."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    out = model(x)
    (out[0].square().sum() + out[1].sum() if isinstance(out, tuple) else out.sum()).backward()
    return [x.grad, *(p.grad for p in model.parameters()), *model.buffers(), torch.rand(2)]


def assert_like_plain(plain, chain, x):
    for got, want in zip(step_of(chain, x), step_of(plain, x), strict=True):
        assert torch.equal(got, want)


BLOCKS = {
    "views before an activation in place": lambda: [
        nn.Linear(4, 4), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(4, 4),
        nn.Flatten(), nn.ELU(inplace=True), nn.Dropout(0.5), nn.Linear(4, 4),
    ],
    "activations in place": lambda: [
        module for _ in range(5) for module in (nn.Linear(4, 4), nn.ReLU(inplace=True))
    ],
    "statistics and draws": lambda: [
        module for _ in range(4)
        for module in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Tanh())
    ],
}  # fmt: skip


@pytest.mark.parametrize("memory", ["sqrt", "log", 2, "inputs"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_numbers_of_the_plain_run(name, memory):
    torch.manual_seed(0)
    plain = nn.Sequential(*BLOCKS[name]())
    chain = recoup.Sequential(*copy.deepcopy(plain), memory=memory)
    assert_like_plain(plain, chain, torch.randn(6, 4))


@pytest.mark.parametrize("first", [nn.Identity(), nn.Flatten(), nn.Dropout(0.0)])
def test_an_input_that_is_kept_and_passed_on_is_not_overwritten(first):
    """The first stage of a segment returns its input, and the second changes it in place."""
    tape = (Tape(0), Tape(1), Tape(2))
    actions = (Keep(0), Advance(0, 3), Load(0), Drop(0), *tape, *(Reverse(i) for i in (2, 1, 0)))
    modules = [first, nn.ReLU(inplace=True), nn.Linear(4, 4)]
    chain = recoup.Sequential(*modules, memory=Schedule(3, actions))
    plain = nn.Sequential(copy.deepcopy(first), nn.ReLU(), copy.deepcopy(modules[2]))
    assert_like_plain(plain, chain, torch.randn(5, 4))


class Doubles(nn.Module):
    """An operator in place in a module that does not say so."""

    def forward(self, x):
        return x.mul_(2)


@pytest.mark.parametrize("memory", ["sqrt", "inputs"])
@pytest.mark.parametrize(
    "pair",
    [
        lambda: [nn.Tanh(), nn.LeakyReLU(0.3, inplace=True)],
        lambda: [nn.Softmax(-1), nn.Dropout(0.3, inplace=True)],
        lambda: [nn.ELU(inplace=True), nn.LeakyReLU(0.3, inplace=True)],
        lambda: [nn.Tanh(), Doubles()],
        lambda: [nn.Sequential(nn.Tanh(), Doubles())],
    ],
)
def test_a_residual_that_a_later_operator_overwrites_is_an_error(pair, memory):
    """As in the plain run: autograd itself does not look at what goes through hooks."""
    modules = [nn.Linear(4, 4), *pair(), *(nn.Linear(4, 4) for _ in range(4))]
    if memory == "inputs":  # in one stage: what a stage of its own overwrites is a copy
        modules = [nn.Sequential(*modules), nn.Linear(4, 4)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nn.Sequential(*modules)(torch.randn(2, 4)).sum().backward()
    with pytest.raises(ChangedError, match="changed in place by a later operator"):
        recoup.Sequential(*modules, memory=memory)(torch.randn(2, 4)).sum().backward()


def test_a_residual_that_is_overwritten_in_a_first_run_is_an_error():
    """A run that takes a gradient itself keeps its residuals while it runs."""

    def force(x):
        y = x.tanh()
        y.mul_(2)
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    with pytest.raises(ChangedError, match="changed in place by a later operator"):
        recoup.checkpoint(force, torch.randn(4, requires_grad=True))


def test_log_dets_of_a_group():
    torch.manual_seed(0)
    modules = [module for _ in range(3) for module in (ActNorm(4), Flip(), InvertibleConv1x1(4))]
    x = torch.randn(8, 4)
    plain = Chain(*modules)
    plain(x)
    chain = Chain(*copy.deepcopy(modules), memory="sqrt")
    assert_like_plain(plain, chain, x)


class Counts(nn.Module):
    """A module that changes a buffer in forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num", torch.zeros(1))

    def forward(self, x):
        self.num += 1
        return x.sin()


def changes_in_place(model):
    with torch.no_grad():
        model[5][0].weight.mul_(2)


def replaces(model):
    model[5][0] = nn.Linear(4, 4)


def sets_the_mode(model):
    model[5][1].eval()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changes_in_place, "`0.weight` of module `5` .* changed in place"),
        (replaces, "`0`, a Linear in module `5` .* was replaced"),
        (sets_the_mode, "module `5` .* was in training mode"),
    ],
)
def test_an_error_names_the_stage(change, said):
    model = recoup.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(10)), memory="sqrt"
    )
    loss = model(torch.randn(2, 4)).sum()
    change(model)
    with pytest.raises(ChangedError, match=said):
        loss.backward()


def test_a_buffer_that_forward_changes_in_a_group():
    def step(memory):
        torch.manual_seed(0)
        counts = Counts()
        modules = [nn.Linear(4, 4), nn.Tanh(), counts, *(nn.Tanh() for _ in range(7))]
        x = torch.randn(2, 4, requires_grad=True)
        recoup.Sequential(*modules, memory=memory)(x).sum().backward()
        return [x.grad, counts.num]

    torch.testing.assert_close(step("sqrt"), step("linear"), rtol=0, atol=0)


class Late(Counts):
    is_late = False

    def forward(self, x):
        return super().forward(x) if self.is_late else x.sin()


def test_an_error_in_forward_names_the_stage():
    late = Late()
    modules = [nn.Linear(4, 4), nn.Tanh(), late, *(nn.Tanh() for _ in range(7))]
    model = recoup.Sequential(*modules, memory="sqrt")
    model(torch.randn(2, 4)).sum().backward()
    late.is_late = True  # once it is known to change nothing
    with pytest.raises(ReplayError, match=r"module `2` .* changes its buffer `num`"):
        model(torch.randn(2, 4))
