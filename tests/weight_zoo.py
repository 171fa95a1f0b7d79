"""Layers that take a weight, ways to reparametrize it, and the plain run beside it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_map

import recoup
from tests.oracle import assert_same_tensors, hooks_in_force, loss_of_all, tensors


class Uses(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], *size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*size) / size[-1] ** 0.5)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


class Reads(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> Tensor:
        return self.weight * 1


class Tied(nn.Module):
    """AWD-LSTM in small: a decoder whose weight is that of the embedding."""

    def __init__(self, *, recurrent: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(12, 6), nn.Dropout(dropout)
        self.rnn = nn.LSTM(6, 6) if recurrent else None
        self.decoder = nn.Linear(6, 12, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embedding(ids).tanh())
        return self.decoder(x if self.rnn is None else self.rnn(x)[0])


def used(module: nn.Module, name: str = "weight") -> Tensor:
    with recoup.weights.step(module), torch.no_grad():
        return getattr(module, name) * 1


def trained(module: nn.Module, x: Tensor) -> nn.Module:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss_of_all(module(x)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return module


def replaced(module: nn.Module) -> nn.Module:
    for part in module.modules():
        for key, value in list(part._parameters.items()):
            other = None if value is None else nn.Parameter(torch.rand_like(value))
            if f"{key}_g" in part._parameters:  # to set it alone is refused
                part._parameters[key] = other
            else:
                setattr(part, key, other)
    return module


def loaded(module: nn.Module, **how: Any) -> nn.Module:
    state = {
        name: torch.rand_like(value) if value.is_floating_point() else value.clone()
        for name, value in module.state_dict().items()
    }
    assert module.load_state_dict(state, strict=True, **how)
    return module


class Runs(nn.Module):
    def __init__(self, layer: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, *args: Any) -> Any:
        return self.run(self.layer, *args)


def packed(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(pack_padded_sequence(x, torch.tensor([5, 3, 2])))[0].data


def looped(cell: nn.Module, x: Tensor) -> Tensor:
    state = None
    for step in x:
        state = cell(step, state)
    return state[0] if isinstance(state, tuple) else state


def repeated(layer: nn.Module, x: Tensor) -> Tensor:
    for _ in range(4):
        x = layer(x).tanh()
    return x


def attending(layer: nn.Module, x: Tensor, *others: Tensor) -> Tensor:
    key, value = others or (x, x)
    return layer(x, key, value, need_weights=False)[0]


def without_mkldnn(layer: nn.Module, x: Tensor) -> Any:
    with torch.backends.mkldnn.flags(enabled=False):
        return layer(x)


def first_of(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)[0]


class Kind(NamedTuple):
    """A layer, what it is given, and its weights: no activation has as many entries as one."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    pattern: str = r"(.*\.)?weight"


def given(*sizes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(size, requires_grad=True) for size in sizes)


_RNN = r"(.*\.)?weight_.*"
_SEQUENCE = given((5, 3, 48))


def _words() -> tuple[Tensor, ...]:
    return (torch.randint(200, (3, 4)),)


LAYERS: dict[str, Kind] = {
    "linear": Kind(lambda: nn.Linear(128, 96), given((3, 128))),
    "linear 3-D": Kind(lambda: nn.Linear(128, 96), given((2, 3, 128))),
    "linear, in a loop": Kind(lambda: Runs(nn.Linear(96, 96), repeated), given((3, 96))),
    "x @ w.t()": Kind(lambda: Uses(lambda x, w: x @ w.t(), 96, 128), given((3, 128))),
    "einsum": Kind(
        lambda: Uses(lambda x, w: torch.einsum("bi,oi->bo", x, w), 96, 128), given((3, 128))
    ),
    "conv1d": Kind(lambda: nn.Conv1d(40, 48, 5), given((2, 40, 9))),
    "conv2d": Kind(lambda: nn.Conv2d(40, 48, 3, padding=1), given((2, 40, 4, 4))),
    "conv2d transposed": Kind(lambda: nn.ConvTranspose2d(40, 48, 3), given((2, 40, 3, 3))),
    "embedding": Kind(lambda: nn.Embedding(200, 80), _words),
    "embedding, sparse": Kind(lambda: nn.Embedding(200, 80, sparse=True), _words),
    "embedding bag, sum": Kind(lambda: nn.EmbeddingBag(200, 80, mode="sum"), _words),
    "bilinear": Kind(lambda: nn.Bilinear(24, 20, 28), given((3, 24), (3, 20))),
    "lstm": Kind(lambda: nn.LSTM(48, 56), _SEQUENCE, _RNN),
    "lstm, mkldnn off": Kind(lambda: Runs(nn.LSTM(48, 56), without_mkldnn), _SEQUENCE, _RNN),
    "lstm of layers, both ways": Kind(
        lambda: nn.LSTM(48, 56, 2, bidirectional=True), _SEQUENCE, _RNN
    ),
    "lstm with projection": Kind(lambda: nn.LSTM(48, 56, proj_size=40), _SEQUENCE, _RNN),
    "lstm, packed": Kind(lambda: Runs(nn.LSTM(48, 56, 2), packed), _SEQUENCE, _RNN),
    "gru": Kind(lambda: nn.GRU(48, 56), _SEQUENCE, _RNN),
    "lstm cell": Kind(lambda: nn.LSTMCell(48, 56), given((3, 48)), _RNN),
    "gru cell": Kind(lambda: nn.GRUCell(48, 56), given((3, 48)), _RNN),
    "lstm cell, in a loop": Kind(lambda: Runs(nn.LSTMCell(48, 56), looped), _SEQUENCE, _RNN),
    "attention to itself": Kind(
        lambda: Runs(nn.MultiheadAttention(64, 4), attending), given((5, 2, 64)), r".*weight"
    ),
    "attention to other widths": Kind(
        lambda: Runs(nn.MultiheadAttention(64, 4, kdim=48, vdim=40), attending),
        given((5, 2, 64), (6, 2, 48), (6, 2, 40)), r".*weight",
    ),
    "encoder layer": Kind(
        lambda: nn.TransformerEncoderLayer(64, 4, 96, batch_first=True),
        given((2, 5, 64)), r".*(in_proj|out_proj\.|linear\d\.)_?weight",
    ),
}  # fmt: skip
PRECISIONS = ("float32", "bfloat16", "autocast")


def built(kind: Kind, precision: str = "float32", *, dropout: bool = True) -> tuple[Any, Any]:
    """The plain layer in training mode, with dropout of activations or without, and its inputs."""
    torch.manual_seed(3)
    module, inputs = kind.build(), kind.inputs()
    for part in module.modules() if not dropout else ():
        name = "p" if isinstance(part, nn.Dropout) else "dropout"
        if isinstance(getattr(part, name, None), float):
            setattr(part, name, 0.0)
    if precision != "bfloat16":
        return module, inputs
    return module.bfloat16(), tree_map(
        lambda x: x.detach().bfloat16().requires_grad_() if x.is_floating_point() else x, inputs
    )


def around(precision: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext()


class Way(NamedTuple):
    norm: dict[str, Any] | None = None
    dropout: dict[str, Any] | None = None
    noise: dict[str, Any] | None = None
    function: Callable[..., Tensor] | None = None
    how: dict[str, Any] = {}  # of all of them  # noqa: RUF012 - a named tuple

    def __call__(self, module: nn.Module, pattern: Any = r"(.*\.)?weight") -> nn.Module:
        if self.function is not None:
            recoup.weights.apply(module, self.function, pattern, **self.how)
        if self.noise is not None:
            recoup.weight_noise(module, pattern, **self.noise, **self.how)
        if self.dropout is not None:
            recoup.weight_dropout(module, pattern, **self.dropout, **self.how)
        if self.norm is not None:
            recoup.weight_norm(module, pattern, **self.norm)
        return module


def multiplied(weight: Tensor, draw: recoup.weights.Draw) -> Tensor:
    return weight * (1 + 0.1 * draw.normal())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.tensor(0.5)), nn.Dropout()

    def forward(self, weight: Tensor, draw: recoup.weights.Draw) -> Tensor:
        return self.drop(weight) * self.scale


OURS = {
    "dropout": Way(dropout={"p": 0.5}),
    "noise": Way(noise={"std": 0.1}),
    "norm": Way(norm={}),
    "stacked": Way(norm={}, dropout={"p": 0.5}, noise={"std": 0.1}),
}
MORE = OURS | {
    "thirds": Way(dropout={"p": 0.3}),
    "shared": Way(dropout={"p": 0.5, "axes": (0,)}),
    "learned": Way(noise={"std": 0.3, "learned": "row"}),
    "function": Way(function=multiplied),
    "all": Way({}, {"p": 0.3}, {"std": 0.3, "learned": "tensor"}, multiplied),
}


def matching(module: nn.Module, pattern: str) -> list[nn.Parameter]:
    return [p for name, p in module.named_parameters() if re.fullmatch(pattern, name)]


def by_name(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(remove_duplicate=False))


def materialised(way: Way, plain: nn.Module, pattern: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The weights of a step; draws are those of copies whose weights are all ones, or zeros."""
    state = torch.get_rng_state()
    names = [name for name in by_name(plain) if re.fullmatch(pattern, name)]
    used = dict(raw)

    def drawn_for(value: float, only: Way) -> dict[str, Tensor]:
        torch.set_rng_state(state)
        probe = copy.deepcopy(plain)
        with torch.no_grad():
            for name in names:
                by_name(probe)[name].fill_(value)
        only(probe, lambda name, *_: name in names)
        with torch.no_grad(), recoup.weights.step(probe):
            owners = {name: probe.get_submodule(name.rpartition(".")[0]) for name in names}
            return {name: getattr(owners[name], name.rpartition(".")[2]) for name in names}

    if way.norm is not None:
        dim = way.norm.get("dim", 0)
        for name in names:
            used[name] = product(raw[name], raw[f"{name}_g"], -1 if dim is None else dim)
    if way.dropout is not None:
        masks = drawn_for(1.0, Way(dropout=way.dropout, how=way.how))
        used |= {name: used[name] * masks[name] for name in names}
    if way.noise is not None:
        learned = way.noise.get("learned")
        unit = {"std": 1.0, "learned": "tensor"} if learned else way.noise
        noise = drawn_for(0.0, Way(noise=unit, how=way.how))
        for name in names:
            made = noise[name] * raw[f"{name}_std"] if learned else noise[name]
            used[name] = used[name] + made.to(used[name].dtype)
    if way.function is not None:
        draws: list[recoup.weights.Draw] = []
        drawn_for(1.0, Way(function=lambda w, draw: draws.append(draw) or w, how=way.how))
        used |= {n: way.function(used[n], draw) for n, draw in zip(names, draws, strict=True)}
    return used


def product(weight: Tensor, norms: Tensor, dim: int) -> Tensor:
    return torch._weight_norm(weight, norms, dim) if weight.dim() else weight * norms / weight.abs()


class Materialised(nn.Module):
    """The oracle: a plain module, run with weights that are made first, of parameters of ours."""

    def __init__(self, way: Way, plain: nn.Module, pattern: str, ours: nn.Module) -> None:
        super().__init__()
        self.way, self.plain, self.pattern, self.ours = way, plain, pattern, ours

    def forward(self, *inputs: Any) -> Any:
        used = materialised(self.way, self.plain, self.pattern, by_name(self.ours))
        used = {name: used[name] for name in by_name(self.plain)}
        return functional_call(self.plain, used, inputs, tie_weights=False)


def one_step(run: nn.Module, parameters: dict[str, Any], *inputs: Any) -> dict[str, Any]:
    output = run(*inputs)
    loss_of_all(output).backward()
    named = {str(place): x for place, x in enumerate(tensors(inputs))} | parameters
    gradients = {f"gradient of {name}": x.grad for name, x in named.items()}
    return {f"output {place}": y for place, y in enumerate(tensors(output))} | gradients


def compare(
    way: Way,
    plain: nn.Module,
    inputs: tuple[Any, ...],
    pattern: str = r"(.*\.)?weight",
    *,
    act: Callable[..., dict[str, Any]] = one_step,
    rtol: float = 0.0,
    seed: int = 11,
) -> tuple[nn.Module, dict[str, Any]]:
    """Compare what `act` leaves with a reparametrized module and with the oracle; return both."""
    ours = way(copy.deepcopy(plain), pattern)
    parameters, start = dict(ours.named_parameters()), copy.deepcopy(ours.state_dict())
    found = []
    for run in (ours, Materialised(way, plain, pattern, ours)):
        ours.load_state_dict(start)
        ours.zero_grad()
        mine = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        torch.manual_seed(seed)
        made = act(run, parameters, *mine)
        made = {name: x if x is None else x.detach().to_dense().clone() for name, x in made.items()}
        owner = ours if run is ours else plain
        made |= {f"buffer {name}": b.clone() for name, b in owner.named_buffers()}
        found.append((made, torch.get_rng_state()))
        assert hooks_in_force() is None
        assert torch.is_grad_enabled()
    assert_same_tensors(found[0][0], found[1][0], rtol)
    assert any(value is not None for value in found[0][0].values())
    assert torch.equal(found[0][1], found[1][1]), "the random stream differs"
    return ours, found[0][0]
