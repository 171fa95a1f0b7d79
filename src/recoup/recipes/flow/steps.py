"""The training steps of a flow: its loss in bits per dimension, its draws, and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from recoup.flows import Flow
from recoup.recipes.checks import check_at_least, check_not_negative
from recoup.recipes.draws import seed_at
from recoup.recipes.flow.data import Batch, SampleBatches

__all__ = ["MONITOR", "TRAINER", "FlowSteps", "measured_step"]

MONITOR = "val_bits_per_dim"
TRAINER = {"gradient_clip_val": 10.0}


class FlowSteps(LightningModule):
    """Train a flow: the loss is bits per dimension.

    `FlowTraining` says what is logged, and what the draws of a step follow from.

    Args:
        flow: The flow.
        optimizer: The optimizer.
        learning_rate: The learning rate after the warm-up.
        num_warmup_steps: Number of steps in which the learning rate rises from 0.
        num_decay_steps: Number of the step at which the learning rate, falling along a cosine, has
            reached 0; None to let it stay.
        seed: Seed of the draws of all steps.
    """

    def __init__(
        self,
        flow: Flow,
        optimizer: Literal["adam", "adamax"] = "adam",
        learning_rate: float = 1e-3,
        num_warmup_steps: int = 50,
        num_decay_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_not_negative(learning_rate=learning_rate)
        check_at_least(0, num_warmup_steps=num_warmup_steps)
        check_at_least(1, num_decay_steps=num_decay_steps)
        if optimizer not in _OPTIMIZERS:
            raise ValueError(f"`optimizer` is {optimizer!r}, but must be one of {[*_OPTIMIZERS]}.")
        self.flow = flow
        self.seed = seed
        self._kind = optimizer
        self._learning_rate = learning_rate
        self._num_warmup_steps = num_warmup_steps
        self._num_decay_steps = num_decay_steps

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the bits per dimension ``(N,)`` of pictures ``(N, C, H, W)`` or points."""
        return self.flow.bits_per_dim(x, labels)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch: its mean bits per dimension."""
        return self._step("train", batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the code length of the batch."""
        self._step("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the code length of the batch."""
        self._step("test", batch)

    def _step(self, stage: str, batch: Batch) -> Tensor:
        x, labels = (batch, None) if isinstance(batch, Tensor) else batch
        parts = {name: bits.mean() for name, bits in self.flow.parts(x, labels).items()}
        loss = torch.stack(list(parts.values())).sum()
        metrics = {**parts, "bits_per_dim": loss}
        if len(self.flow.shape) == 1:
            metrics["nats_per_point"] = loss * (self.flow.num_dims * math.log(2))
        self.log_dict(
            {f"{stage}_{name}": value.detach() for name, value in metrics.items()},
            on_step=False,
            on_epoch=True,
            batch_size=len(x),
            sync_dist=True,
        )
        return loss

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed the draws of this step."""
        self._seed("train", self.current_epoch, batch_idx)

    def on_validation_batch_start(
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Seed the draws of this batch, the same in each epoch."""
        self._seed("val", batch_idx)

    def on_test_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Seed the draws of this batch."""
        self._seed("test", batch_idx)

    def _seed(self, *key: str | int) -> None:
        torch.manual_seed(seed_at(self.seed, self.global_rank, *key))

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and the schedule that sets its learning rate for each step."""
        kind = _OPTIMIZERS[self._kind]
        optimizer = kind(self.flow.parameters(), lr=self._learning_rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _rate(self, step: int) -> float:
        """Return the factor on the learning rate at the step with this number."""
        rate = min(1.0, (step + 1) / max(1, self._num_warmup_steps))
        if self._num_decay_steps is not None:
            rate *= 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / self._num_decay_steps))
        return rate


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
}


def measured_step(
    model: FlowSteps, data: SampleBatches, device: torch.device
) -> Callable[[], object]:
    """Return a training step on the first samples, without the optimizer."""
    flow, count = model.flow, data.batch_size
    x = data.parts["train"][:count].to(device)
    x = x.to(flow.base.like.dtype) if x.is_floating_point() else x
    labels = data.labels["train"][:count].to(device) if data.labels else None

    def step() -> None:
        flow.zero_grad(set_to_none=False)
        flow.bits_per_dim(x, labels).mean().backward()

    return step
