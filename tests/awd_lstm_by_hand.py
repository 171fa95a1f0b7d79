"""AWD-LSTM written out by hand, in plain torch: what the example's training is compared with.

Nothing of recoup is used. What is random (lengths of windows, masks) is given, so that two programs
can be compared step by step; everything else is here: reading, columns, the LSTM cell by its gates,
one step of time after the other, the penalties, clipping, SGD with a rate for each length, and the
average that begins once validation no longer improves.

Merity, Keskar and Socher, https://arxiv.org/abs/1708.02182; the penalties of Merity, McCann and
Socher, https://arxiv.org/abs/1708.01009.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """The numbers of a training that are not sizes."""

    bptt: int
    learning_rate: float
    weight_decay: float
    clip: float
    activation_penalty: float
    temporal_penalty: float
    num_patient: int
    input_dropout: float
    hidden_dropout: float
    output_dropout: float
    embedding_dropout: float
    weight_dropout: float


@dataclass(frozen=True)
class Draws:
    """What a step keeps, as bool: None where nothing is dropped.

    Attributes:
        activations: of the input of the first layer and of the output of each, ``(T, N, C)``, or
            ``(1, N, C)`` for one mask for all steps of time.
        words: of the words of the vocabulary, ``(V,)``.
        recurrent: of the hidden-to-hidden weight of each layer, ``(4 * H, H)``.
    """

    activations: list[Tensor | None]
    words: Tensor | None
    recurrent: list[Tensor | None]


def numbers_of(path: Path, number: dict[str, int]) -> Tensor:
    """Read a text that was tokenized before: its words, and a mark at the end of each line."""
    unknown = number["<unk>"]
    found: list[int] = []
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            found += [number.get(word, unknown) for word in line.split()]
            found.append(number.get("<eos>", unknown))
    return torch.tensor(found)


def side_by_side(numbers: Tensor, num_columns: int) -> Tensor:
    """Lay a text out in columns ``(T, N)``: the second begins where the first ends."""
    num_rows = len(numbers) // num_columns
    columns = [numbers[n * num_rows : (n + 1) * num_rows] for n in range(num_columns)]
    return torch.stack(columns, dim=1)


class PlainTraining:
    """A training of AWD-LSTM by plain operators.

    Args:
        weights: the first values, by the names that `torch.nn` gives them: ``embedding.weight``,
            ``layers.0.weight_ih_l0``, ..., ``decoder.bias``, and ``decoder.weight`` if it is not
            that of the embedding. They are copied.
        settings: the other numbers.
    """

    def __init__(self, weights: dict[str, Tensor], settings: Settings) -> None:
        self.weights = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
        self.settings = settings
        self.num_layers = sum(name.endswith("weight_ih_l0") for name in weights)
        self.gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []  # in validation
        self.sums: dict[str, Tensor] | None = None  # of the weights after each step
        self.num_averaged = 0
        self.state: list[tuple[Tensor, Tensor]] = []

    def begin(self, num_columns: int) -> list[tuple[Tensor, Tensor]]:
        """Return the state before a text: hidden and cell ``(N, H)`` of each layer, zeros."""
        sizes = [self.weights[f"layers.{n}.weight_hh_l0"].shape[1] for n in range(self.num_layers)]
        like = self.weights["embedding.weight"]
        return [(like.new_zeros(num_columns, h), like.new_zeros(num_columns, h)) for h in sizes]

    def step(self, window: Tensor, draws: Draws) -> float:
        """Train on a window ``(T + 1, N)``; return its loss."""
        num_steps = len(window) - 1
        loss, self.state = self._loss(window, draws, self.state)
        names = list(self.weights)
        gradients = torch.autograd.grad(loss, [self.weights[name] for name in names])
        # As torch clips: in float32 it makes the norm of millions of entries 1e-3 too small.
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        clip = self.settings.clip
        share = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        rate = self.settings.learning_rate * num_steps / self.settings.bptt
        for name, gradient in zip(names, gradients, strict=True):
            self.gradients[name] = share * gradient
            with torch.no_grad():
                weight = self.weights[name]
                weight -= rate * (share * gradient + self.settings.weight_decay * weight)
        if self.sums is not None:
            self.num_averaged += 1
            for name, total in self.sums.items():
                total += self.weights[name].detach()
        return float(loss.detach())

    def validate(self, columns: Tensor) -> float:
        """Return the perplexity of a text ``(T, N)``, and begin to average if that is due."""
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        if self.num_averaged and self.sums is not None:
            weights = {name: total / self.num_averaged for name, total in self.sums.items()}
        perplexity = self.perplexity(columns, weights)
        before = self.losses[: max(0, len(self.losses) - self.settings.num_patient)]
        if before and perplexity > min(before) and self.sums is None:
            self.sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.losses.append(perplexity)
        return perplexity

    @torch.no_grad()
    def perplexity(self, columns: Tensor, weights: dict[str, Tensor]) -> float:
        """Return the exponential of the mean loss of all words of a text but the first row."""
        state, total = self.begin(columns.shape[1]), 0.0
        for time in range(len(columns) - 1):
            x = weights["embedding.weight"][columns[time]]
            for n in range(self.num_layers):
                x, cell = _cell(weights, n, weights[f"layers.{n}.weight_hh_l0"], x, state[n])
                state[n] = (x, cell)
            total += float(_nll(_logits(weights, x), columns[time + 1]).double().sum())
        return math.exp(total / columns[1:].numel())

    def _loss(
        self, window: Tensor, draws: Draws, state: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        s, weights, state = self.settings, self.weights, list(state)
        places = [s.input_dropout, *[s.hidden_dropout] * (self.num_layers - 1), s.output_dropout]
        # Dropped once for the window: words wherever they occur, and connections between steps. The
        # decoder's use of the same weight drops nothing.
        table = weights["embedding.weight"]
        if draws.words is not None:
            table = table * _scaled(draws.words, s.embedding_dropout, table)[:, None]
        recurrent = [weights[f"layers.{n}.weight_hh_l0"] for n in range(self.num_layers)]
        for n, kept in enumerate(draws.recurrent):
            if kept is not None:
                recurrent[n] = recurrent[n] * _scaled(kept, s.weight_dropout, recurrent[n])

        inputs = table[window[:-1]]
        raw: list[Tensor] = []
        dropped: list[Tensor] = []
        for time in range(len(inputs)):
            x = _drop(inputs[time], draws.activations[0], places[0], time)
            hidden = x
            for n in range(self.num_layers):
                hidden, cell = _cell(weights, n, recurrent[n], x, state[n])
                state[n] = (hidden, cell)
                x = _drop(hidden, draws.activations[n + 1], places[n + 1], time)
            raw.append(hidden)
            dropped.append(x)
        outputs = torch.stack(dropped)
        loss = _nll(_logits(weights, outputs), window[1:]).mean()
        if s.activation_penalty:
            loss = loss + s.activation_penalty * outputs.square().mean()
        if s.temporal_penalty and len(raw) > 1:
            changes = torch.stack([after - before for before, after in pairwise(raw)])
            loss = loss + s.temporal_penalty * changes.square().mean()
        return loss, [(hidden.detach(), cell.detach()) for hidden, cell in state]


def _cell(
    weights: dict[str, Tensor], n: int, recurrent: Tensor, x: Tensor, state: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """One step of time of layer `n`: hidden and cell state."""
    hidden, cell = state
    of = f"layers.{n}."
    sums = x @ weights[of + "weight_ih_l0"].T + weights[of + "bias_ih_l0"]
    sums = sums + hidden @ recurrent.T + weights[of + "bias_hh_l0"]
    size = hidden.shape[1]
    into = torch.sigmoid(sums[:, :size])
    forget = torch.sigmoid(sums[:, size : 2 * size])
    new = torch.tanh(sums[:, 2 * size : 3 * size])
    out = torch.sigmoid(sums[:, 3 * size :])
    cell = forget * cell + into * new
    return out * torch.tanh(cell), cell


def _logits(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    decoder = weights.get("decoder.weight", weights["embedding.weight"])
    return x @ decoder.T + weights["decoder.bias"]


def _nll(logits: Tensor, words: Tensor) -> Tensor:
    """Return the negative log-likelihood of each word, in nats."""
    right = logits.gather(-1, words.unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(logits, dim=-1) - right


def _drop(x: Tensor, kept: Tensor | None, p: float, time: int) -> Tensor:
    if kept is None:
        return x
    return x * kept[time if len(kept) > 1 else 0] / (1 - p)


def _scaled(kept: Tensor, p: float, like: Tensor) -> Tensor:
    """Return a mask of a weight; its rate counts as a multiple of 1/65536, as it is documented."""
    p = round(p * 65536) / 65536
    return kept.to(like.dtype) / (1 - p)
