"""A second run decides as the first did, also where its numbers are a rounding error off."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import recoup
from recoup._core.operators import num_dispatch_modes
from tests.alive import held_after
from tests.deciding import Router, perturbed
from tests.zoo import Fn

TIES = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]]).repeat(4, 1)


def taken(x, indices):
    return x.gather(-1, indices) if indices.dim() == x.dim() else x.gather(-1, indices[..., None])


def weights_of(x):
    return torch.arange(1.0, x.shape[-1] + 1) * x.sin()


OPERATORS = {
    "topk": lambda x: x.topk(2).values * taken(weights_of(x), x.topk(2).indices),
    "sort": lambda x: x.sort(stable=True, descending=True).values * torch.arange(8.0),
    "argmin of all": lambda x: weights_of(x).flatten()[(-x).argmin()].exp(),
    "max": lambda x: x.max(-1)[0] * taken(weights_of(x), x.max(-1)[1])[:, 0],
    "kthvalue": lambda x: x.kthvalue(6, keepdim=True)[0] * weights_of(x),
    "mode": lambda x: taken(weights_of(x), x.mode(-1).indices),
    "unique rows": lambda x: x.exp()[:1] * torch.unique(x, dim=1, return_counts=True)[1].sum(),
    "median": lambda x: taken(weights_of(x), (2 * x).median(-1).indices),
    "cummax": lambda x: taken(weights_of(x), x.cummax(-1).indices),
    "mask": lambda x: weights_of(x)[x > 1.0].sum() + weights_of(x)[x <= 1.0].square().sum(),
    "nonzero": lambda x: weights_of(x).flatten()[(x - 1).nonzero()[:, 1]].sin(),
    "unique": lambda x: x.sin() * x.unique().numel() + torch.unique(x, return_inverse=True)[1],
    "multinomial": lambda x: taken(weights_of(x), (50 * x).softmax(-1).multinomial(2)).sin(),
    "bernoulli": lambda x: (x * torch.bernoulli((x - 0.5).clamp(0, 1).detach())).exp(),
    "item": lambda x: x.exp() if x[0, 2].item() > 1 else x.sin(),
    "equal": lambda x: x.exp() if torch.equal(x, TIES) else x.sin(),
    "converted": lambda x: x.exp() * (x - 1).bool() + x * ((x * 2**23).long() % 3),
    "bucketize": lambda x: weights_of(x) * torch.bucketize(x, torch.tensor([0.5, 1.0])),
    "signs": lambda x: x.exp() * torch.signbit(1 - x) + (1 - x).logical_not() * x.sin(),
    "any": lambda x: x.exp() if (x - 1).any(-1).all() else x.sin(),
    "copied": lambda x: x.masked_fill(torch.zeros(8).copy_(x.detach()[0]) > 1, 0.0).sin(),
    "no grad": lambda x: taken(weights_of(x), torch.no_grad()(torch.topk)(x, 3).indices),
    "dropout after a draw": lambda x: nn.functional.dropout(
        taken(weights_of(x), x.softmax(-1).multinomial(4)).sin(), 0.5
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_decides_once(name):
    # A module: of a function, what others of the same code decide would be known.
    code = Fn(lambda x: OPERATORS[name](perturbed(x * 1)).exp())

    def step(run):
        torch.manual_seed(3)
        x = TIES.clone().requires_grad_()
        y = run(code, x)
        y.sum().backward()
        return [x.grad, torch.rand(2)]

    plain = step(lambda fn, x: fn(x))
    for _ in range(2):
        torch.testing.assert_close(step(recoup.checkpoint), plain, rtol=1e-4, atol=1e-4)


def test_the_bytes_of_comparisons_quantizations_and_indices():
    x, tokens = torch.randn(1000, 1000, requires_grad=True), torch.randn(32, 16, requires_grad=True)
    for code, given, expected in (
        (lambda x: torch.where(x > 0, x, 0.1 * x), x, x.numel() // 8),
        (lambda x: x + (x.detach().to(torch.int8) - x.detach()), x, 0),
        (Router(), tokens, 32 * 2),  # a byte for each of the two experts of each token
    ):
        for _ in range(2):
            held = held_after(partial(recoup.checkpoint, code, given)).num_bytes
        assert held - given.nbytes == expected


def order(x):
    """Of another memory layout, as is the mask of a transposed tensor."""
    return x.view(2, 4, 8).transpose(1, 2).sort(1).values.transpose(1, 2).view(-1).square()


def mask_in_vmap(x):
    return torch.vmap(lambda row: (row > 0) * row, in_dims=1, out_dims=1)(x.repeat(10, 1)).sin()


def in_forward_mode(x):
    return torch.func.jvp(lambda t: (t * x) * ((t * x) > 0), (x,), (torch.ones_like(x),))[1].sin()


def with_a_nested_tensor(x):
    nested = torch.nested.nested_tensor([x.detach()[:3], x.detach()[3:]])
    return x.sin() * (nested > 0).unbind()[0].any()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:`torch.jit.script`")
@pytest.mark.parametrize(
    "code",
    [mask_in_vmap, in_forward_mode, with_a_nested_tensor, order,
     lambda x: (2 * x * (x.t() > 0).t().view(64).view(8, 8)).square()],
)  # fmt: skip
def test_what_wraps_tensors_or_has_another_layout_is_as_in_the_plain_run(code):
    """The first run is looked at in a mode; the later ones intercept operators."""
    for _ in range(4):
        x = torch.randn(8, 8, requires_grad=True)
        scores = lambda x: code(x * (x > -1))  # noqa: E731
        want = torch.autograd.grad(scores(x).sum(), x)[0]
        assert torch.equal(torch.autograd.grad(recoup.checkpoint(scores, x).sum(), x)[0], want)


def test_a_cached_mask_that_nothing_compares():
    """A later run that decides less was given what is of other calls; it decides anew."""
    cache, num_modes = {}, []

    def code(x):
        num_modes.append(num_dispatch_modes())
        if "mask" not in cache:
            cache["mask"] = x > 0.5
        return (x * (x > -0.5)).cos() + cache["mask"] * x.sin()

    for is_known in (False, True, True):
        x = torch.randn(8, 8, requires_grad=True)
        want = torch.autograd.grad(code(x * 1).sum(), x)[0]
        cache.clear()
        num_modes.clear()
        y = recoup.checkpoint(lambda x: code(x * 1), x, compare=False)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
        assert num_modes == [0 if is_known else 1] * 3  # composite operators differ in a mode
        cache.clear()
