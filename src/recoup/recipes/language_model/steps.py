"""The training steps of a language model: its loss through time, and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torchmetrics import MeanMetric

import recoup
from recoup.recipes.checks import check_at_least, check_not_negative
from recoup.recipes.draws import seed_at
from recoup.recipes.language_model.averaging import AveragingKind, TriggeredAveraging
from recoup.recipes.language_model.cache import NeuralCache
from recoup.recipes.language_model.data import TokenWindows
from recoup.recipes.language_model.network import LanguageModel, State
from recoup.recipes.language_model.plan import TimePlan
from recoup.recipes.language_model.segments import (
    Penalties,
    Trained,
    Window,
    sum_of_nll,
    window_backward,
)

__all__ = ["MONITOR", "TRAINER", "LanguageModelSteps", "Perplexity", "measured_step"]

MONITOR = "val_perplexity"
TRAINER = {"reload_dataloaders_every_n_epochs": 1}  # Each epoch has other windows.


class Perplexity(MeanMetric):
    """Exponential of the mean negative log-likelihood, from sums over all tokens."""

    def add(self, nll: Tensor, num_tokens: int) -> None:
        """Count tokens whose negative log-likelihoods, in nats, add up to `nll`."""
        self.set_dtype(torch.float64)  # A model that is cast to 16 bits also casts its metrics.
        # The mean skips NaN, but a training that diverged must show.
        nll = nll.double().nan_to_num(nan=math.inf, posinf=math.inf)
        self.update(nll / num_tokens, weight=num_tokens)

    def compute(self) -> Tensor:
        """Return the perplexity of all tokens."""
        return super().compute().exp()


class LanguageModelSteps(LightningModule):
    """Train a language model through time.

    `LanguageModelTraining` says what is logged, and what the draws of a step follow from.

    Args:
        network: The language model.
        bptt: Length of a window at which the learning rate is as given; it is scaled by the length.
        weight_noise_start: Number of the step from which there is noise.
        activation_penalty: Weight of the mean square of the outputs (AR).
        temporal_penalty: Weight of the mean square of their differences in time (TAR).
        optimizer: The optimizer.
        learning_rate: The learning rate.
        weight_decay: The weight decay.
        clip: Largest norm of the gradient; 0 for no bound.
        averaging: Whether the parameters are averaged: "triggered", "always" or "never".
        num_patient: How many of the last validations the trigger does not count.
        memory: What backward remembers of a window: "linear", "sqrt" or a number of bytes.
        seed: Seed of the draws of all steps.
    """

    def __init__(
        self,
        network: LanguageModel,
        bptt: int = 70,
        weight_noise_start: int = 0,
        activation_penalty: float = 2.0,
        temporal_penalty: float = 1.0,
        optimizer: Literal["sgd", "adam"] = "sgd",
        learning_rate: float = 30.0,
        weight_decay: float = 1.2e-6,
        clip: float = 0.25,
        averaging: AveragingKind = "triggered",
        num_patient: int = 5,
        memory: str = "linear",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_at_least(0, weight_noise_start=weight_noise_start, num_patient=num_patient)
        check_not_negative(
            activation_penalty=activation_penalty,
            temporal_penalty=temporal_penalty,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            clip=clip,
        )
        for name, given, choices in (
            ("optimizer", optimizer, [*_OPTIMIZERS]),
            ("averaging", averaging, [*get_args(AveragingKind)]),
        ):
            if given not in choices:
                raise ValueError(f"`{name}` is {given!r}, but must be one of {choices}.")
        self.automatic_optimization = False
        self.network = network
        self.penalties = Penalties(activation_penalty, temporal_penalty)
        self.plan = TimePlan(memory)
        self.averaging: AveragingKind = averaging
        self.seed = seed
        self.cache: NeuralCache | None = None  # for the test part only
        # Names end in an underscore, since modules have a method `train`.
        self.perplexities = torch.nn.ModuleDict(
            {f"{stage}_": Perplexity() for stage in ("train", "val", "test", "test_cache")}
        )
        # One for training, one for validation, which may run in the middle of an epoch.
        self._states: dict[str, State] = {}
        self._bptt = bptt
        self._weight_noise_start = weight_noise_start
        self._clip = clip
        self._num_patient = num_patient
        self._kind = optimizer
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay

    def forward(self, ids: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the logits ``(T, N, vocab_size)`` of tokens ``(T, N)``, and the state after."""
        return self.network(ids, state)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Take a step on a window ``(T + 1, N)``, carry the state over, and return the loss."""
        torch.manual_seed(seed_at(self.seed, self.global_rank, self.current_epoch, batch_idx))
        self.network.set_weight_noise(self.global_step >= self._weight_noise_start)
        window = Window(batch, self._state_before("train", batch))
        store, trained = self.gradients(window, self.plan.segment_steps(window.num_steps))
        self._states["train"] = trained.state
        self._count("train", trained.nll, window.num_steps * batch.shape[1])
        self._step(store, window.num_steps / self._bptt)
        return trained.loss

    def gradients(
        self, window: Window, segment_steps: int | None
    ) -> tuple[recoup.GradStore, Trained]:
        """Return the gradients of the loss of a window, and the loss and the state after it."""
        store = recoup.GradStore(self.network.parameters())
        trained = window_backward(
            self.network,
            window,
            store,
            penalties=self.penalties,
            segment_steps=segment_steps,
            masks=self.network.new_masks(window.num_steps, window.ids.shape[1]),
        )
        return store, trained

    def prepare_memory(self, batch_size: int, longest: int, device: torch.device) -> None:
        """Measure steps to find segments that keep the bound on bytes, if there is one.

        Args:
            batch_size: number of columns N.
            longest: number of steps of the longest window.
            device: device of the training; the network is moved there.

        Raises:
            ValueError: when the bound cannot be kept.
        """
        if self.plan.budget_bytes is None:
            return
        network = self.network.to(device)

        def peak(num_steps: int, segment_steps: int) -> int:
            ids = torch.zeros(num_steps + 1, batch_size, dtype=torch.int64, device=device)
            window = Window(ids, network.zero_state(batch_size))

            def step() -> recoup.GradStore:
                return self.gradients(window, segment_steps)[0]

            return recoup.measure(step, device=device, repeats=0).peak_bytes

        network.set_weight_noise(True)
        self.plan.measure(peak, longest)

    def _step(self, store: recoup.GradStore, scale: float) -> None:
        """Take an optimizer step, with the learning rate scaled for this step only."""
        optimizer: Any = self.optimizers()
        if self.trainer.world_size > 1:
            store.all_reduce_()
        if self._clip:
            store.clip_norm_(self._clip)
        rates = [group["lr"] for group in optimizer.param_groups]
        try:
            for group in optimizer.param_groups:
                group["lr"] *= scale
            store.step(optimizer)
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Add the loss of a window ``(T + 1, N)`` of the validation part."""
        self._evaluate("val", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Add the loss of a window ``(T + 1, N)`` of the test part."""
        self._evaluate("test", batch)

    def on_train_epoch_start(self) -> None:
        """Begin at the start of the text."""
        self._states.pop("train", None)

    def on_validation_epoch_start(self) -> None:
        """Begin at the start of the text."""
        self._states.pop("val", None)

    def on_test_epoch_start(self) -> None:
        """Begin at the start of the text."""
        self._states.pop("test", None)
        if self.cache is not None:
            self.cache.forget()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return _OPTIMIZERS[self._kind](
            self.network.parameters(), lr=self._learning_rate, weight_decay=self._weight_decay
        )

    def configure_callbacks(self) -> list[Callback]:
        """Return the callback that averages the parameters."""
        if self.averaging == "never":
            return []
        return [
            TriggeredAveraging(
                MONITOR,
                self._num_patient,
                from_start=self.averaging == "always",
            )
        ]

    def _evaluate(self, stage: str, batch: Tensor) -> None:
        encoded = self.network.encode(batch[:-1], self._state_before(stage, batch))
        self._states[stage] = encoded.state
        logits, targets = self.network.decoder(encoded.dropped), batch[1:]
        self._count(stage, sum_of_nll(logits, targets), targets.numel())
        if self.cache is not None:
            nll = self.cache.nll(logits, encoded.raw, targets).sum()
            self._count(f"{stage}_cache", nll, targets.numel())

    def _state_before(self, stage: str, batch: Tensor) -> State:
        state = self._states.get(stage)
        return self.network.zero_state(batch.shape[1]) if state is None else state

    def _count(self, stage: str, nll: Tensor, num_tokens: int) -> None:
        metric = self.perplexities[f"{stage}_"]
        if not isinstance(metric, Perplexity):
            raise TypeError(f"{stage} has a {type(metric).__name__} instead of a perplexity.")
        metric.add(nll, num_tokens)
        self.log(f"{stage}_perplexity", metric, on_step=False, on_epoch=True)


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}


def measured_step(
    model: LanguageModelSteps, data: TokenWindows, device: torch.device
) -> Callable[[], object]:
    """Return a training step on the first window, without the optimizer."""
    ids = data.first_window().to(device)
    window = Window(ids, model.network.zero_state(ids.shape[1]))
    segment_steps = model.plan.segment_steps(window.num_steps)
    return lambda: model.gradients(window, segment_steps)
