"""AWD-LSTM written out by hand, in plain torch: what the example's training is compared with.

Nothing of recoup is used. What is random (lengths of windows, masks) is given, so that two programs
can be compared step by step; everything else is here: reading, columns, the LSTM cell by its gates,
one step of time after the other, the penalties, a rate of SGD for each length, and the average that
begins once validation no longer improves.

Merity, Keskar and Socher, https://arxiv.org/abs/1708.02182; the penalties of Merity, McCann and
Socher, https://arxiv.org/abs/1708.01009.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

State = tuple[Tensor, Tensor]  # hidden and cell ``(N, H)`` of a layer


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
        self.optimizer = torch.optim.SGD(
            self.weights.values(), settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.losses: list[float] = []  # in validation
        self.sums: dict[str, Tensor] | None = None  # of the weights after each step
        self.num_averaged = 0
        self.state: list[State] = []

    def begin(self, num_columns: int) -> list[State]:
        """Return the state before a text: hidden and cell ``(N, H)`` of each layer, zeros."""
        sizes = [self.weights[f"layers.{n}.weight_hh_l0"].shape[1] for n in range(self.num_layers)]
        like = self.weights["embedding.weight"]
        return [(like.new_zeros(num_columns, h), like.new_zeros(num_columns, h)) for h in sizes]

    def step(self, window: Tensor, draws: Draws) -> float:
        """Train on a window ``(T + 1, N)``; return its loss."""
        settings = self.settings
        outputs, raw = self._run(self.weights, window[:-1], draws)
        loss = _nll(self.weights, outputs, window[1:])
        loss = loss + settings.activation_penalty * outputs.square().mean()
        if len(raw) > 1:
            loss = loss + settings.temporal_penalty * raw.diff(dim=0).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(self.weights.values(), settings.clip)
        share = (len(window) - 1) / settings.bptt
        self.optimizer.param_groups[0]["lr"] = settings.learning_rate * share
        self.optimizer.step()
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
        training, self.state = self.state, self.begin(columns.shape[1])
        outputs, _ = self._run(weights, columns[:-1])
        parts = zip(outputs.split(64), columns[1:].split(64), strict=True)  # few logits at a time
        total = sum(float(_nll(weights, part, words)) * len(words) for part, words in parts)
        perplexity = math.exp(total / len(outputs))
        self.state = training
        before = self.losses[: max(0, len(self.losses) - self.settings.num_patient)]
        if before and perplexity > min(before) and self.sums is None:
            self.sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.losses.append(perplexity)
        return perplexity

    def _run(
        self, weights: dict[str, Tensor], ids: Tensor, draws: Draws | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs ``(T, N, C)`` of the last layer: dropped, and as they were before."""
        s, num_layers = self.settings, self.num_layers
        draws = draws or Draws([None] * (num_layers + 1), None, [None] * num_layers)
        places = [s.input_dropout, *[s.hidden_dropout] * (num_layers - 1), s.output_dropout]
        # Dropped once for the window: words wherever they occur, and connections between steps. The
        # decoder's use of the same weight drops nothing.
        table = weights["embedding.weight"]
        if draws.words is not None:
            table = table * _scaled(draws.words, s.embedding_dropout, table)[:, None]
        recurrent = [weights[f"layers.{n}.weight_hh_l0"] for n in range(num_layers)]
        for n, kept in enumerate(draws.recurrent):
            if kept is not None:
                recurrent[n] = recurrent[n] * _scaled(kept, s.weight_dropout, recurrent[n])
        state, raw, dropped = list(self.state), [], []
        for time, x in enumerate(table[ids]):
            hidden = x = _drop(x, draws.activations[0], places[0], time)
            for n in range(num_layers):
                hidden, _ = state[n] = _cell(weights, n, recurrent[n], x, state[n])
                x = _drop(hidden, draws.activations[n + 1], places[n + 1], time)
            raw.append(hidden)
            dropped.append(x)
        self.state = [(hidden.detach(), cell.detach()) for hidden, cell in state]
        return torch.stack(dropped), torch.stack(raw)


def _cell(weights: dict[str, Tensor], n: int, recurrent: Tensor, x: Tensor, state: State) -> State:
    """One step of time of layer `n`: hidden and cell state."""
    hidden, cell = state
    of = f"layers.{n}."
    sums = x @ weights[of + "weight_ih_l0"].T + weights[of + "bias_ih_l0"]
    sums = sums + hidden @ recurrent.T + weights[of + "bias_hh_l0"]
    into, forget, new, out = sums.chunk(4, dim=1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def _nll(weights: dict[str, Tensor], outputs: Tensor, words: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the words, in nats."""
    decoder = weights.get("decoder.weight", weights["embedding.weight"])
    logits = outputs @ decoder.T + weights["decoder.bias"]
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def _drop(x: Tensor, kept: Tensor | None, p: float, time: int) -> Tensor:
    if kept is None:
        return x
    return x * kept[time if len(kept) > 1 else 0] / (1 - p)


def _scaled(kept: Tensor, p: float, like: Tensor) -> Tensor:
    """Return a mask of a weight; its rate counts as a multiple of 1/65536, as it is documented."""
    p = round(p * 65536) / 65536
    return kept.to(like.dtype) / (1 - p)
