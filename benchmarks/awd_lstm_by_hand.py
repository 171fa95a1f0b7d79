"""AWD-LSTM written out by hand, in plain torch, beside the example of a language model.

Nothing of recoup computes here. Given by the example are the first weights and what is random: the
lengths of windows, and masks, read under the seed of each step. The rest is computed anew: columns,
the LSTM cell by its gates, one step of time after the other, the penalties, gradients, a rate of
SGD for each length, the average that begins once validation no longer improves, and perplexities.

Merity, Keskar and Socher, https://arxiv.org/abs/1708.02182; the penalties of Merity, McCann and
Socher, https://arxiv.org/abs/1708.01009.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F

import recoup
from examples.command_line import seed_at

State = tuple[Tensor, Tensor]  # hidden and cell ``(N, H)`` of a layer


def numbers_of(path: Path, number: dict[str, int]) -> Tensor:
    """Read a text that was tokenized before: its words, and a mark at the end of each line."""
    found: list[int] = []
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            found += [number.get(word, number["<unk>"]) for word in [*line.split(), "<eos>"]]
    return torch.tensor(found)


def side_by_side(numbers: Tensor, num_columns: int) -> Tensor:
    """Lay a text out in columns ``(T, N)``: the second begins where the first ends."""
    num_rows = len(numbers) // num_columns
    return torch.stack(numbers[: num_rows * num_columns].split(num_rows), dim=1)


class Beside(Callback):
    """The training by hand, which takes each step after the example has taken it.

    Args:
        train: the training text ``(T,)`` as numbers.
        validation: the validation text.
        columns: number of columns of each.
        nudge: a factor of the first weights.

    Attributes:
        losses: of each step, the example's and that by hand.
        perplexities: of each validation, likewise.
        gradient_error: the largest difference of a gradient as the optimizer sees it, over its
            largest entry.
        num_averaged: number of steps whose weights are in the average.
    """

    def __init__(
        self, train: Tensor, validation: Tensor, columns: tuple[int, int], nudge: float = 1.0
    ) -> None:
        self._train = side_by_side(train, columns[0])
        self._validation = side_by_side(validation, columns[1])
        self._nudge, self._start, self._state = nudge, 0, list[State]()
        self._sums: dict[str, Tensor] = {}  # of the weights after each step, once they are averaged
        self.losses: list[tuple[float, float]] = []
        self.perplexities: list[tuple[float, float]] = []
        self.gradient_error, self.num_averaged = 0.0, 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._settings, self._network = pl_module.hparams, pl_module.network
        named = dict(self._network.named_parameters())
        self._weights = {n: (self._nudge * p).detach().requires_grad_() for n, p in named.items()}
        self._optimizer = torch.optim.SGD(
            self._weights.values(), weight_decay=self._settings.weight_decay
        )

        def note(*_: Any) -> None:
            self._given = {name: p.grad.clone() for name, p in named.items()}

        trainer.optimizers[0].register_step_pre_hook(note)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._start, self._state = 0, self._first_state(self._train.shape[1])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> Any:
        """Read what the step keeps: an entry of a weight that is not zero in the one it uses."""
        torch.manual_seed(seed_at(self._settings.seed, 0, trainer.current_epoch, batch_idx))
        self._masks = self._network.new_masks(len(batch) - 1, batch.shape[1])
        with recoup.weights.same_draw(), recoup.weights.step(self._network):
            names = [each.name for each in recoup.weights.applied(self._network)]
            owners = [self._network.get_submodule(name.rpartition(".")[0]) for name in names]
            self._kept = {
                name: getattr(owner, name.rpartition(".")[2]).detach().ne(0)
                for name, owner in zip(names, owners, strict=True)
            }

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        settings, weights = self._settings, self._weights
        window = self._train[self._start : self._start + len(batch)]
        assert torch.equal(window, batch), "The example has another window."
        self._start += len(batch) - 1
        dropped, raw = self._run(weights, window[:-1], self._masks)
        loss = _nll(weights, dropped, window[1:])
        loss = loss + settings.activation_penalty * dropped.square().mean()
        if len(raw) > 1:
            loss = loss + settings.temporal_penalty * raw.diff(dim=0).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        if settings.clip:
            torch.nn.utils.clip_grad_norm_(weights.values(), settings.clip)
        share = (len(window) - 1) / settings.bptt
        self._optimizer.param_groups[0]["lr"] = settings.learning_rate * share
        self._optimizer.step()
        self.losses.append((float(outputs["loss"]), float(loss.detach())))
        self.num_averaged += bool(self._sums)
        for name, weight in weights.items():
            if self._sums:
                self._sums[name] += weight.detach()
            error = (self._given[name] - weight.grad).abs().max() / weight.grad.abs().max()
            self.gradient_error = max(self.gradient_error, float(error))

    @torch.no_grad()
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Compare the perplexities, and begin to average if that is due."""
        weights, training = self._weights, self._state
        if self.num_averaged:
            weights = {name: total / self.num_averaged for name, total in self._sums.items()}
        self._state = self._first_state(self._validation.shape[1])
        outputs, _ = self._run(weights, self._validation[:-1])
        self._state = training
        parts = zip(outputs.split(64), self._validation[1:].split(64), strict=True)  # few logits
        total = sum(float(_nll(weights, part, words)) * len(words) for part, words in parts)
        perplexity = math.exp(total / len(outputs))
        num_counted = max(0, len(self.perplexities) - self._settings.num_patient)
        before = [by_hand for _, by_hand in self.perplexities[:num_counted]]
        if before and perplexity > min(before) and not self._sums:
            self._sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        found = float(trainer.callback_metrics["val_perplexity"])
        self.perplexities.append((found, perplexity))

    @property
    def loss_error(self) -> float:
        """The largest relative difference of a loss."""
        return max(abs(ours - theirs) / abs(theirs) for ours, theirs in self.losses)

    @property
    def perplexity_error(self) -> float:
        """The largest relative difference of a perplexity."""
        return max(abs(ours - theirs) / abs(theirs) for ours, theirs in self.perplexities)

    def _first_state(self, num_columns: int) -> list[State]:
        recurrent = [w for name, w in self._weights.items() if name.endswith("weight_hh_l0")]
        zeros = [each.new_zeros(num_columns, each.shape[1]) for each in recurrent]
        return [(each, each) for each in zeros]

    def _run(
        self, weights: dict[str, Tensor], ids: Tensor, masks: list[Tensor | None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The outputs ``(T, N, C)`` of the last layer: dropped, and as they were before."""
        s, num_layers = self._settings, len(self._state)
        rates = [s.input_dropout, *[s.hidden_dropout] * (num_layers - 1), s.output_dropout]
        used = dict(weights)
        if masks is not None:  # Once for the window; the tied decoder's use drops nothing.
            for name, kept in self._kept.items():
                p = s.embedding_dropout if name == "embedding.weight" else s.weight_dropout
                p = round(p * 65536) / 65536  # It counts as a multiple, as it is documented.
                used[name] = weights[name] * kept / (1 - p)

        def drop(x: Tensor, place: int, time: int) -> Tensor:
            mask = None if masks is None else masks[place]
            return x if mask is None else x * mask[time % len(mask)] / (1 - rates[place])

        raw, dropped = list[Tensor](), list[Tensor]()
        for time, x in enumerate(used["embedding.weight"][ids]):
            hidden = x = drop(x, 0, time)
            for n in range(num_layers):
                hidden, _ = self._state[n] = _cell(used, f"layers.{n}.", x, *self._state[n])
                x = drop(hidden, n + 1, time)
            raw.append(hidden)
            dropped.append(x)
        self._state = [(hidden.detach(), cell.detach()) for hidden, cell in self._state]
        return torch.stack(dropped), torch.stack(raw)


def _cell(weights: dict[str, Tensor], of: str, x: Tensor, hidden: Tensor, cell: Tensor) -> State:
    """One step of time of a layer: hidden and cell state."""
    sums = x @ weights[of + "weight_ih_l0"].T + weights[of + "bias_ih_l0"]
    sums = sums + hidden @ weights[of + "weight_hh_l0"].T + weights[of + "bias_hh_l0"]
    into, forget, new, out = sums.chunk(4, dim=1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def _nll(weights: dict[str, Tensor], outputs: Tensor, words: Tensor) -> Tensor:
    """The mean negative log-likelihood of the words, in nats."""
    decoder = weights.get("decoder.weight", weights["embedding.weight"])
    logits = outputs @ decoder.T + weights["decoder.bias"]
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())
