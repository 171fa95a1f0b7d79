"""Layers whose gradients are collected, and what plain autograd makes of them."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import recoup
from recoup import GradStore
from tests.oracle import assert_same_tensor
from tests.weight_zoo import Runs, Tied, attending, first_of
from tests.zoo import autocast

MODES = ("auto", "grad", "harvest")
WAYS = (*MODES, "collecting")


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.fails = False

    def between(self, y):
        y = y * 1.0
        y.register_hook(self.hook)
        return y

    def forward(self, x):
        return self.last(self.between(self.first(x)))

    def hook(self, gradient):
        if self.fails:
            raise RuntimeError("on purpose")


def noisy(apply):
    return apply(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), ".*weight")


def rows(width=4):
    return torch.randn(5, width)


def words():
    return torch.randint(9, (5, 2))


# In float64, unless the name says otherwise: the layer, and its input.
LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), rows),
    "conv": (
        lambda: nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last),
        lambda: torch.randn(2, 3, 5, 6).to(memory_format=torch.channels_last),
    ),
    "sparse": (lambda: nn.Embedding(40, 3, sparse=True), words),
    "lstm": (lambda: Runs(nn.LSTM(4, 3, 2), first_of), lambda: torch.randn(5, 2, 4)),
    "attention": (
        lambda: Runs(nn.MultiheadAttention(4, 2), attending), lambda: torch.randn(3, 2, 4)
    ),
    "tied": (lambda: Tied(recurrent=False), words),
    "bfloat16": (lambda: nn.Linear(4, 3).bfloat16(), lambda: rows().bfloat16()),
    "sparse bfloat16": (lambda: nn.Embedding(40, 3, sparse=True, dtype=torch.bfloat16), words),
    # Whose weights are cast, or made again in backward.
    "autocast bfloat16": (lambda: autocast(torch.bfloat16), lambda: rows(6)),
    "dropout": (lambda: noisy(recoup.weight_dropout), rows),
    "noise": (lambda: noisy(recoup.weight_noise), rows),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, list[Tensor]]:
    build, make_input = LAYERS[name]
    module, inputs = build(), [make_input(), make_input()]
    if "bfloat16" not in name:
        module.double()
        inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    return module, inputs


def loss_of(output: Tensor) -> Tensor:
    return output.double().sin().sum()


def holding(params, *gradients, weight: float = 1.0) -> GradStore:
    """A store; a number stands for a gradient full of it, and None for no gradient."""
    store = GradStore(params)
    for param, gradient in zip(params, gradients, strict=False):
        if gradient is not None:
            is_given = isinstance(gradient, Tensor)
            store.add_(param, gradient if is_given else torch.full_like(param, gradient))
    store.weight = weight
    return store


def scaler_of(scale: float = 8.0, **settings) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **settings)


def tripled(params, scaler) -> GradStore:
    store = GradStore(params)
    store.backward(sum((3.0 * each).sum() for each in params), scaler=scaler)
    return store


def same(one, other) -> bool:
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def collect(store, output: Tensor, way: str, seed: Tensor | None = None, **settings) -> None:
    if way == "collecting":
        with store.collecting():
            output.backward(seed, **settings)
    else:
        store.backward(output, seed, mode=way, **settings)


def plain(module: nn.Module, inputs: list[Tensor], loss=loss_of) -> dict[str, Tensor]:
    module = copy.deepcopy(module)
    torch.manual_seed(3)
    total: dict[str, Tensor] = {}
    for x in inputs:
        module.zero_grad()
        loss(module(x)).backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                is_low = parameter.dtype is torch.bfloat16
                gradient = (parameter.grad.float() if is_low else parameter.grad).to_dense()
                total[name] = gradient + total[name] if name in total else gradient.clone()
    return total


def assert_holds(store, module: nn.Module, want: dict[str, Tensor], rtol: float = 0.0):
    got = store.named(module)
    assert set(got) == set(want)
    for name, value in want.items():
        assert_same_tensor(name, got[name].to_dense(), value, rtol)


@contextmanager
def undisturbed(*tensors: Tensor):
    """A context at whose end `.grad` and `grad_dtype` are the same objects, and values."""
    for tensor in tensors:
        tensor.grad = torch.full_like(tensor, 7, dtype=tensor.grad_dtype)
    before = [(tensor.grad, tensor.grad_dtype) for tensor in tensors]
    yield
    for tensor, (gradient, dtype) in zip(tensors, before, strict=True):
        assert tensor.grad is gradient
        assert tensor.grad_dtype is dtype
        assert bool((gradient == 7).all())
        assert not getattr(tensor, "_post_accumulate_grad_hooks", None)
