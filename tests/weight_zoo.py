"""Layers of every kind that takes a weight, and ways to put noise on it: ours, and what is kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_map

import recoup

# -- modules of users ------------------------------------------------------------------------------


class Uses(nn.Module):
    """A weight in an operator of the user's own."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], *size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*size) / size[-1] ** 0.5)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


class Packed(nn.Module):
    """A recurrent layer on sequences of several lengths."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(pack_padded_sequence(x, torch.tensor([5, 3, 2])))[0].data


class Loop(nn.Module):
    """A cell at each step of a sequence."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x:
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class Again(nn.Module):
    """A layer that is run on its own output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.layer(x).tanh()
        return x


class Bags(nn.Module):
    """Bags of an embedding, with or without a weight for each entry."""

    def __init__(self, mode: str, *, weighted: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(200, 80, mode=mode)
        self.entry = nn.Parameter(torch.rand(3, 4)) if weighted else None

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids, per_sample_weights=self.entry)


class Attends(nn.Module):
    """Attention of a sequence to itself, or to two others."""

    def __init__(self, *, to_itself: bool, with_weights: bool = False, **sizes: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True, **sizes)
        self.to_itself = to_itself
        self.with_weights = with_weights

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x, x) if self.to_itself else (key, value)
        return self.attention(x, key, value, need_weights=self.with_weights)[0]


class Without(nn.Module):
    """A layer run with mkldnn turned off, forward and backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):
            return self.layer(*args)


# -- layers ----------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A layer, what it is given, and which of its parameters are the weights.

    No activation has as many entries as a weight, so storages tell one from the other.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    pattern: str = r"(.*\.)?weight"


def _x(*size: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*size, requires_grad=True),)


def _three() -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, n, 64, requires_grad=True) for n in (5, 6, 6))


def _kv() -> tuple[Tensor, ...]:
    sizes = ((2, 5, 64), (2, 6, 48), (2, 6, 40))
    return tuple(torch.randn(*size, requires_grad=True) for size in sizes)


def _ids(num: int) -> tuple[Tensor, ...]:
    return (torch.randint(200, (3, num)),)


_RNN = r"(.*\.)?weight_.*"
_SEQUENCE = _x(5, 3, 48)
LAYERS: dict[str, Kind] = {
    "linear": Kind(lambda: nn.Linear(128, 96), _x(3, 128)),
    "linear 1-D": Kind(lambda: nn.Linear(128, 96), _x(128)),
    "linear 3-D": Kind(lambda: nn.Linear(128, 96), _x(2, 3, 128)),
    "linear, no bias": Kind(lambda: nn.Linear(128, 96, bias=False), _x(3, 128)),
    "linear 3-D, no bias": Kind(lambda: nn.Linear(128, 96, bias=False), _x(2, 3, 128)),
    "linear, in a loop": Kind(lambda: Again(nn.Linear(96, 96)), _x(3, 96)),
    "x @ w": Kind(lambda: Uses(lambda x, w: x @ w, 128, 96), _x(3, 128)),
    "x @ w.t()": Kind(lambda: Uses(lambda x, w: x @ w.t(), 96, 128), _x(3, 128)),
    "w.t() @ x": Kind(lambda: Uses(lambda x, w: w.t() @ x, 128, 96), _x(128, 3)),
    "x @ w.view": Kind(lambda: Uses(lambda x, w: x @ w.view(128, -1), 128, 12, 8), _x(3, 128)),
    "x @ part of w": Kind(lambda: Uses(lambda x, w: x @ w[:, :48], 128, 96), _x(3, 128)),
    "x @ chunks of w": Kind(
        lambda: Uses(lambda x, w: torch.cat([x @ v.t() for v in w.chunk(3)], 1), 96, 128),
        _x(3, 128),
    ),
    "chunks of w @ each other": Kind(
        lambda: Uses(lambda x, w: x @ (w[:64].t() @ torch.mm(*w.chunk(2))), 128, 64), _x(3, 64)
    ),
    "x * w": Kind(lambda: Uses(lambda x, w: (x * w).sum(1), 128, 96), _x(128, 1)),
    "einsum": Kind(
        lambda: Uses(lambda x, w: torch.einsum("bi,oi->bo", x, w), 96, 128), _x(3, 128)
    ),
    "bmm": Kind(lambda: Uses(torch.bmm, 2, 128, 48), _x(2, 3, 128)),
    "baddbmm": Kind(
        lambda: Uses(lambda x, w: torch.baddbmm(x[:, :, :1], x, w), 2, 128, 48), _x(2, 3, 128)
    ),
    "conv1d": Kind(lambda: nn.Conv1d(40, 48, 5), _x(2, 40, 9)),
    "conv2d": Kind(lambda: nn.Conv2d(40, 48, 3, padding=1), _x(2, 40, 4, 4)),
    "conv2d of groups": Kind(lambda: nn.Conv2d(40, 80, 3, groups=2), _x(2, 40, 4, 4)),
    "conv2d, mkldnn off": Kind(
        lambda: Without(nn.Conv2d(40, 48, 3, padding=1)), _x(2, 40, 4, 4)
    ),
    "conv3d": Kind(lambda: nn.Conv3d(16, 20, 3), _x(2, 16, 3, 3, 3)),
    "conv1d transposed": Kind(lambda: nn.ConvTranspose1d(40, 48, 5), _x(2, 40, 5)),
    "conv2d transposed": Kind(lambda: nn.ConvTranspose2d(40, 48, 3), _x(2, 40, 3, 3)),
    "conv3d transposed": Kind(lambda: nn.ConvTranspose3d(16, 20, 3), _x(2, 16, 2, 2, 2)),
    "embedding": Kind(lambda: nn.Embedding(200, 80), lambda: _ids(4)),
    "embedding, padded": Kind(lambda: nn.Embedding(200, 80, padding_idx=3), lambda: _ids(4)),
    "embedding, sparse": Kind(lambda: nn.Embedding(200, 80, sparse=True), lambda: _ids(4)),
    "embedding bag, sum": Kind(lambda: Bags("sum"), lambda: _ids(4)),
    "embedding bag, mean": Kind(lambda: Bags("mean"), lambda: _ids(4)),
    "embedding bag, weighted": Kind(lambda: Bags("sum", weighted=True), lambda: _ids(4)),
    "bilinear": Kind(lambda: nn.Bilinear(24, 20, 28), lambda: (*_x(3, 24)(), *_x(3, 20)())),
    "lstm": Kind(lambda: nn.LSTM(48, 56), _SEQUENCE, _RNN),
    "lstm, mkldnn off": Kind(lambda: Without(nn.LSTM(48, 56)), _SEQUENCE, _RNN),
    "lstm of layers, both ways": Kind(
        lambda: nn.LSTM(48, 56, 2, bidirectional=True), _SEQUENCE, _RNN
    ),
    "lstm of layers, both ways, mkldnn off": Kind(
        lambda: Without(nn.LSTM(48, 56, 2, bidirectional=True)), _SEQUENCE, _RNN
    ),
    "lstm, no bias, batch first": Kind(
        lambda: nn.LSTM(48, 56, bias=False, batch_first=True), _SEQUENCE, _RNN
    ),
    "lstm with projection": Kind(lambda: nn.LSTM(48, 56, proj_size=40), _SEQUENCE, _RNN),
    "lstm with dropout": Kind(lambda: nn.LSTM(48, 56, 2, dropout=0.2), _SEQUENCE, _RNN),
    "lstm, packed": Kind(lambda: Packed(nn.LSTM(48, 56, 2)), _SEQUENCE, _RNN),
    "lstm, recurrent weights": Kind(lambda: nn.LSTM(48, 56, 2), _SEQUENCE, r"(.*\.)?weight_hh_l\d"),
    "gru": Kind(lambda: nn.GRU(48, 56), _SEQUENCE, _RNN),
    "gru of layers, both ways": Kind(
        lambda: nn.GRU(48, 56, 2, bidirectional=True), _SEQUENCE, _RNN
    ),
    "gru, packed": Kind(lambda: Packed(nn.GRU(48, 56)), _SEQUENCE, _RNN),
    "rnn": Kind(lambda: nn.RNN(96, 112), _x(5, 3, 96), _RNN),
    "rnn of layers, relu": Kind(lambda: nn.RNN(96, 112, 2, "relu"), _x(5, 3, 96), _RNN),
    "lstm cell": Kind(lambda: nn.LSTMCell(48, 56), _x(3, 48), _RNN),
    "gru cell": Kind(lambda: nn.GRUCell(48, 56), _x(3, 48), _RNN),
    "rnn cell": Kind(lambda: nn.RNNCell(96, 112), _x(3, 96), _RNN),
    "lstm cell, in a loop": Kind(lambda: Loop(nn.LSTMCell(48, 56)), _SEQUENCE, _RNN),
    "gru cell, in a loop": Kind(lambda: Loop(nn.GRUCell(48, 56)), _SEQUENCE, _RNN),
    "rnn cell, in a loop": Kind(lambda: Loop(nn.RNNCell(96, 112)), _x(5, 3, 96), _RNN),
    "attention to itself": Kind(lambda: Attends(to_itself=True), _three, r".*weight"),
    "attention to others": Kind(lambda: Attends(to_itself=False), _three, r".*weight"),
    "attention with its weights": Kind(
        lambda: Attends(to_itself=False, with_weights=True), _three, r".*weight"
    ),
    "attention to other widths": Kind(
        lambda: Attends(to_itself=False, kdim=48, vdim=40), _kv, r".*weight"
    ),
    "encoder layer": Kind(
        lambda: nn.TransformerEncoderLayer(64, 4, 96, batch_first=True),
        _x(2, 5, 64),
        r".*(in_proj|out_proj\.|linear\d\.)_?weight",
    ),
    "decoder layer": Kind(
        lambda: nn.TransformerDecoderLayer(64, 4, 96, batch_first=True),
        lambda: (*_x(2, 5, 64)(), *_x(2, 6, 64)()),
        r".*(in_proj|out_proj\.|linear\d\.)_?weight",
    ),
}  # fmt: skip

# -- precisions ------------------------------------------------------------------------------------

PRECISIONS = ("float32", "bfloat16", "autocast")


def built(kind: Kind, precision: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The plain layer in training mode, and its inputs."""
    torch.manual_seed(3)
    module, inputs = kind.build(), kind.inputs()
    if precision != "bfloat16":
        return module, inputs
    return module.bfloat16(), tree_map(
        lambda x: x.detach().bfloat16().requires_grad_() if x.is_floating_point() else x, inputs
    )


def around(precision: str) -> AbstractContextManager[Any]:
    """What is around a forward in this precision."""
    return torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext()


# -- ways to put noise on weights ------------------------------------------------------------------

Apply = Callable[[nn.Module, str], nn.Module]


def _stacked(module: nn.Module, pattern: str) -> nn.Module:
    recoup.weight_noise(module, pattern, 0.1)
    recoup.weight_dropout(module, pattern, 0.5)
    return recoup.weight_norm(module, pattern)


OURS: dict[str, Apply] = {
    "dropout": lambda module, pattern: recoup.weight_dropout(module, pattern, 0.5),
    "noise": lambda module, pattern: recoup.weight_noise(module, pattern, 0.1),
    "norm": recoup.weight_norm,
    "stacked": _stacked,
}


def _dropped(weight: Tensor) -> Tensor:
    return F.dropout(weight, 0.5)


def _noised(weight: Tensor) -> Tensor:
    return weight + 0.1 * torch.randn_like(weight)


class Keeping(nn.Module):
    """The layer run with weights that are made before it runs, and kept by whoever saves them."""

    def __init__(self, module: nn.Module, pattern: str, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.names = [name for name, _ in matching(module, pattern)]
        self.make = make

    def forward(self, *args: Any) -> Any:
        parameters = dict(self.module.named_parameters())
        made = {name: self.make(parameters[name]) for name in self.names}
        return functional_call(self.module, made, args)


class _Parametrization(nn.Module):
    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, weight: Tensor) -> Tensor:
        return self.make(weight)


def _parametrized(module: nn.Module, pattern: str, make: Callable[[Tensor], Tensor]) -> nn.Module:
    for name, _ in matching(module, pattern):
        owner, _, key = name.rpartition(".")
        parametrize.register_parametrization(
            module.get_submodule(owner), key, _Parametrization(make)
        )
    return module


def matching(module: nn.Module, pattern: str) -> list[tuple[str, nn.Parameter]]:
    """The parameters that a pattern means."""
    return [pair for pair in module.named_parameters() if re.fullmatch(pattern, pair[0])]


NAIVE: dict[str, Apply] = {
    "dropout, kept": lambda module, pattern: Keeping(module, pattern, _dropped),
    "noise, kept": lambda module, pattern: Keeping(module, pattern, _noised),
    "dropout, parametrize": lambda module, pattern: _parametrized(module, pattern, _dropped),
    "noise, parametrize": lambda module, pattern: _parametrized(module, pattern, _noised),
}
