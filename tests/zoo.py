"""Chains that are hard on whoever runs a module a second time, in double precision."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import recoup
from tests.deciding import Grouped, Router

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, default_fused_wt_fake_quant


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64).requires_grad_()


class Fn(nn.Module):
    def __init__(self, fn: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.fn, self.parts = fn, nn.ModuleList(parts)

    def forward(self, x: Any) -> Any:
        return self.fn(x, *self.parts)


def to_tuple(x: Tensor, linear: nn.Module) -> Any:
    y = linear(x).tanh()
    return {"pair": (y, [x * 2, None]), "index": torch.arange(3, device=x.device), "number": 7}


def through_dict(state: Any, linear: nn.Module) -> Any:
    y, (x, nothing) = state["pair"]
    assert nothing is None
    assert state["number"] == 7
    z = (linear(y) * x).sigmoid()
    return {"pair": (z, [z, None]), "index": state["index"] + 1, "number": 7}


def from_dict(state: Any) -> Tensor:
    y, (x, _) = state["pair"]
    return (y * x).sin()[:, state["index"]]


def recurrent(state: Any, gru: nn.Module) -> Any:
    return gru(*state) if isinstance(state, tuple) else gru(state)


def with_unused() -> nn.Module:
    made = Fn(lambda x, linear, _: linear(x).tanh(), nn.Linear(6, 6), nn.Linear(1, 3))
    made.parts[0].bias.requires_grad_(False)
    return made


def draws_itself(x: Tensor, linear: nn.Module, dropout: nn.Module) -> Tensor:
    x = x * torch.rand(x.shape[1], dtype=x.dtype, device=x.device)
    return dropout(linear(x)).tanh() + torch.randn_like(x)


class SavesTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0]
        return grad * ctx.saved_tensors[1] + 0 * x


def asks_twice() -> nn.Module:
    return Fn(lambda x: SavesTwice.apply((x / 2).tanh()))


def dense(dropout: float = 0.0, width: int = 6) -> nn.Module:
    parts = [nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, width)]
    return nn.Sequential(*parts)


def conv_norm() -> nn.Module:
    parts = [nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout2d(0.3)]
    return nn.Sequential(*parts)


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)


def shared() -> list[nn.Module]:
    block, norm = dense(0.2), nn.BatchNorm1d(6)
    return [block, norm, nn.Tanh(), block, norm, nn.Sigmoid(), block]


def inplace() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))] * 2 + [
        nn.Sequential(nn.BatchNorm1d(6), nn.ELU(inplace=True), nn.Linear(6, 6)) for _ in range(4)
    ]


CHAINS: dict[str, Callable[[], tuple[list[nn.Module], Any]]] = {
    "mlp": lambda: ([dense() for _ in range(7)], leaf(4, 6)),
    "convolutions and norms": lambda: ([conv_norm() for _ in range(6)], leaf(3, 3, 4, 4)),
    "dropout": lambda: ([dense(0.5) for _ in range(7)], leaf(4, 6)),
    "dropout alone": lambda: ([nn.Dropout(0.5) for _ in range(6)], leaf(4, 6)),
    "draws itself": lambda: (
        [Fn(draws_itself, nn.Linear(6, 6), nn.Dropout(0.4)) for _ in range(6)], leaf(4, 6)
    ),
    "draws and buffers": lambda: (
        [nn.Sequential(dense(0.5), nn.BatchNorm1d(6), Running(), nn.Tanh()) for _ in range(5)],
        leaf(4, 6),
    ),
    "nested values": lambda: (
        [dense(), Fn(to_tuple, nn.Linear(6, 6)),
         *(Fn(through_dict, nn.Linear(6, 6)) for _ in range(3)), Fn(from_dict)],
        leaf(4, 6),
    ),
    "transformer": lambda: ([transformer() for _ in range(4)], leaf(2, 3, 8)),
    "recurrent": lambda: (
        [Fn(recurrent, nn.GRU(4, 4, batch_first=True)) for _ in range(5)], leaf(2, 3, 4)
    ),
    "shared across depth": lambda: (shared(), leaf(4, 6)),
    "frozen and unused": lambda: ([with_unused() for _ in range(5)], leaf(4, 6)),
    "input without gradient": lambda: ([dense(0.2) for _ in range(5)], leaf(4, 6).detach()),
    "whole numbers in": lambda: (
        [nn.Embedding(9, 6), *(dense(0.2) for _ in range(5))], torch.tensor([1, 8, 1])
    ),
    "input is a view": lambda: (
        [dense() for _ in range(4)], leaf(4, 12).detach()[:, ::2].requires_grad_()
    ),
    "in place within": lambda: (inplace(), leaf(4, 6)),
    "in place as stages": lambda: (
        [nn.Linear(6, 6), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Flatten(),
         nn.ELU(inplace=True), nn.Dropout(0.5), nn.Linear(6, 6)],
        leaf(4, 6),
    ),
    "saved twice": lambda: ([asks_twice() for _ in range(6)], leaf(4, 6)),
    "identities": lambda: ([nn.Identity(), dense(), nn.Identity(), nn.Flatten()], leaf(4, 6)),
    "one": lambda: ([dense(0.2)], leaf(4, 6)),
    "two": lambda: ([dense(0.2), dense(0.2)], leaf(4, 6)),
    "a hundred": lambda: (
        [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(100)], leaf(4, 6)
    ),
}  # fmt: skip


def autocast(dtype: torch.dtype) -> nn.Module:
    def run(x: Tensor, *parts: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype):
            for part in parts:
                x = part(x)
        return x.float()

    return Fn(run, nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 6), nn.Softmax(-1))


def scattered(x: Tensor) -> Tensor:
    places = (torch.arange(x.numel(), device=x.device) * 7 % 6).view_as(x)
    summed = torch.zeros_like(x).scatter_add(1, places, x.sin()).exp()
    rows = torch.arange(len(x), device=x.device) // 2
    return summed.index_add(0, rows, x.cos()).tanh()


def quantized(x: Tensor, linear: Any, of_x: nn.Module, of_w: nn.Module) -> Tensor:
    return F.linear(of_x(x), of_w(linear.weight)).tanh()


def changed_in_place(x: Tensor, relu: nn.Module) -> Tensor:
    return (relu(x * 2) + x).mul_(3).sigmoid_()


def sequence(layer: nn.Module) -> nn.Module:
    def run(x: Tensor, layer: nn.Module) -> Tensor:
        found = layer(*[x.view(3, 4, 6)] * (3 if isinstance(layer, nn.MultiheadAttention) else 1))
        return (found[0] if isinstance(found, tuple) else found).reshape(12, -1)

    return Fn(run, layer)


def caught(x: Tensor, linear: nn.Module) -> Tensor:
    try:
        y = linear(x.sin())
    except Exception:  # noqa: BLE001
        y = x.detach()
    return y * 2


def energy() -> nn.Module:
    parts = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), Fn(torch.sin)]
    return nn.Sequential(*parts, nn.Linear(6, 1))


def force(x: Tensor, energy: nn.Module, after: nn.Module) -> Tensor:
    z = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(energy(z).sum(), z, create_graph=True)
    return after((x.sin() - 0.1 * found).tanh())


def force_of_its_input(x: Tensor, energy: nn.Module, after: nn.Module) -> Tensor:
    h = after(x).tanh()
    (found,) = torch.autograd.grad(energy(h).sum(), h, create_graph=True)
    (again,) = torch.autograd.grad((h * found).sum(), x, create_graph=True)
    return (h.sin() - 0.1 * found).tanh() + again


def draws_around_a_gradient(x: Tensor, linear: nn.Module) -> Tensor:
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        z = F.dropout(linear(F.dropout(x)).tanh())
        (found,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    return z + F.dropout(found) * found.sin()


def offloaded(x: Tensor, module: nn.Module) -> Tensor:
    with recoup.offloading(1, tempfile.gettempdir()):
        return module(x)


def not_kept(x: Tensor, module: nn.Module) -> Tensor:
    return recoup.recompute(module)(x).sin()


class Running(nn.Module):
    def __init__(self, *, is_replaced: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.is_replaced = is_replaced

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.is_replaced:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        elif self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        return (x - self.mean).sin()


class CountsTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("counts", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sin()
        self.counts += torch.bincount(y.detach().argmax(-1), minlength=6)
        return y * (1 + self.counts.clone())


def routed(x: Tensor) -> Tensor:
    rows = torch.rand(len(x), device=x.device).gt(0.3).nonzero().squeeze(-1)
    return x.index_add(0, rows, F.dropout(x[rows].sin(), 0.5))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "bfloat16": lambda: autocast(torch.bfloat16),
    "float16": lambda: autocast(torch.float16),
    "wide": lambda: nn.Sequential(nn.Linear(6, 4096), nn.LayerNorm(4096), nn.Linear(4096, 6)),
    "index": lambda: Fn(scattered),
    "rrelu": lambda: nn.Sequential(nn.Linear(6, 600), nn.RReLU()),
    "dropout in place": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(inplace=True)),
    "alpha dropout": lambda: nn.Sequential(nn.AlphaDropout(), nn.SELU(), nn.FeatureAlphaDropout()),
    "dropout1d": lambda: nn.Sequential(sequence(nn.Dropout1d()), nn.Tanh()),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)),
    "spectral norm": lambda: spectral_norm(nn.Linear(6, 6)),
    "weight norm": lambda: weight_norm(nn.Linear(6, 6)),
    "fake quantization": lambda: Fn(
        quantized, nn.Linear(6, 6), FusedMovingAvgObsFakeQuantize(), default_fused_wt_fake_quant()
    ),
    "lstm": lambda: sequence(nn.LSTM(6, 6, 2, dropout=0.4, batch_first=True)),
    "attention": lambda: sequence(nn.MultiheadAttention(6, 2, dropout=0.3)),
    "encoder": lambda: sequence(nn.TransformerEncoderLayer(6, 2, 12, 0.3)),
    "encoder in evaluation": lambda: sequence(nn.TransformerEncoderLayer(6, 2, 12)).eval(),
    "router": lambda: Router(6),
    "router, expert by expert": lambda: Grouped(6),
    "rows by a draw": lambda: Fn(routed),
    "in place": lambda: Fn(changed_in_place, nn.LeakyReLU(0.1, inplace=True)),
    "caught": lambda: Fn(caught, nn.Linear(6, 6)),
    "group norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.GroupNorm(2, 6), nn.GELU("tanh")),
    "running mean": Running,
    "replaced mean": lambda: Running(is_replaced=True),
    "counts": CountsTokens,
    "force": lambda: Fn(force, energy(), nn.Linear(6, 6)),
    "force of its input": lambda: Fn(force_of_its_input, energy(), nn.Linear(6, 6)),
    "draws around a gradient": lambda: Fn(draws_around_a_gradient, nn.Linear(6, 6)),
    "checkpoint": lambda: Fn(lambda x, module: recoup.checkpoint(module, x), dense(0.5)),
    "offloading": lambda: Fn(offloaded, nn.Sequential(dense(0.5), nn.RReLU(), nn.Tanh())),
    "noise": lambda: recoup.weight_noise(nn.Linear(6, 6), std=0.1),
    "value that is not kept": lambda: Fn(not_kept, dense(0.5)),
    "output that is not kept": lambda: recoup.Recompute(dense(0.5)),
}


def chain_of(name: str) -> tuple[list[nn.Module], Any]:
    torch.manual_seed(3)
    if name in MODULES:
        module = MODULES[name]()
        parts = [nn.Tanh(), nn.Identity(), module, nn.Identity(), nn.Softsign()]
        return parts, torch.randn(12, 6).requires_grad_()
    modules, x = CHAINS[name]()
    for module in modules:
        module.double()
    return modules, x


def linear_of(depth, memory):
    """What `recoup.curve` builds in its processes."""
    return nn.Linear(3, 3), torch.ones(2, 3)
