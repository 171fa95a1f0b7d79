"""A run of the example of a language model, and the same training by hand beside it."""

from __future__ import annotations

from dataclasses import fields

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

import recoup
from examples.command_line import seed_at
from tests.awd_lstm_by_hand import Draws, PlainTraining, Settings, side_by_side


class Beside(Callback):
    """The training by hand, which takes each step after the example has taken it.

    Given by the example: the first weights, the lengths of windows, and the masks of each step,
    read from outside under the seed of the step. Windows, losses, gradients, steps, averages and
    perplexities are computed anew.

    Args:
        train: the training text ``(T,)`` as numbers.
        validation: the validation text.
        columns: number of columns of each.

    Attributes:
        losses: of each step, the example's and that by hand.
        perplexities: of each validation, likewise.
        gradient_error: the largest difference of a gradient as the optimizer sees it, over its
            largest entry.
    """

    def __init__(self, train: Tensor, validation: Tensor, columns: tuple[int, int]) -> None:
        self._train = side_by_side(train, columns[0])
        self._validation = side_by_side(validation, columns[1])
        self._start = 0
        self._given: dict[str, Tensor] = {}
        self.losses: list[tuple[float, float]] = []
        self.perplexities: list[tuple[float, float]] = []
        self.gradient_error = 0.0

    def on_fit_start(self, trainer, pl_module) -> None:
        given = pl_module.hparams
        settings = Settings(**{field.name: given[field.name] for field in fields(Settings)})
        weights = {name: p * 1.0 for name, p in pl_module.network.named_parameters()}
        self.by_hand = PlainTraining(weights, settings)

    def on_train_start(self, trainer, pl_module) -> None:
        names = {id(p): name for name, p in pl_module.network.named_parameters()}

        def note(optimizer, args, kwargs) -> None:
            parameters = optimizer.param_groups[0]["params"]
            self._given = {names[id(p)]: p.grad.clone() for p in parameters}

        trainer.optimizers[0].register_step_pre_hook(note)

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        self._start = 0
        self.by_hand.state = self.by_hand.begin(self._train.shape[1])

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        seed = seed_at(pl_module.hparams["seed"], 0, trainer.current_epoch, batch_idx)
        self._draws = draws_of(pl_module.network, seed, len(batch) - 1, batch.shape[1])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        window = self._train[self._start : self._start + len(batch)]
        assert torch.equal(window, batch), "The example has another window."
        self._start += len(batch) - 1
        loss = self.by_hand.step(window, self._draws)
        self.losses.append((float(outputs["loss"]), loss))
        for name, weight in self.by_hand.weights.items():
            gradient = weight.grad
            error = (self._given[name] - gradient).abs().max() / gradient.abs().max()
            self.gradient_error = max(self.gradient_error, float(error))

    def on_validation_end(self, trainer, pl_module) -> None:
        if not trainer.sanity_checking:
            found = float(trainer.callback_metrics["val_perplexity"])
            self.perplexities.append((found, self.by_hand.validate(self._validation)))

    @property
    def loss_error(self) -> float:
        """The largest relative difference of a loss."""
        return _largest(self.losses)

    @property
    def perplexity_error(self) -> float:
        """The largest relative difference of a perplexity."""
        return _largest(self.perplexities)


def draws_of(network: nn.Module, seed: int, num_steps: int, num_columns: int) -> Draws:
    """Return what a step with this seed keeps.

    An entry of a weight is kept if it is not zero in the weight that the step is given.
    """
    torch.manual_seed(seed)
    masks = network.new_masks(num_steps, num_columns)
    used: dict[str, Tensor] = {}
    with recoup.weights.same_draw(), recoup.weights.step(network):
        used["words"] = network.embedding.weight.detach().ne(0).any(dim=1)
        for n, layer in enumerate(network.layers):
            used[f"recurrent {n}"] = layer.weight_hh_l0.detach().ne(0)
    dropped = {each.name for each in recoup.weights.applied(network)}
    return Draws(
        activations=masks,
        words=used["words"] if "embedding.weight" in dropped else None,
        recurrent=[
            used[f"recurrent {n}"] if f"layers.{n}.weight_hh_l0" in dropped else None
            for n in range(len(network.layers))
        ],
    )


def _largest(pairs: list[tuple[float, float]]) -> float:
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
