"""The training of a flow: its loss in bits per dimension, and its optimizer."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from recoup.recipes.checks import check_at_least, check_not_negative
from recoup.recipes.draws import seed_at
from recoup.recipes.flow.builders import FLOW_SETTINGS, FlowName, build_flow

__all__ = ["FlowTraining"]

Batch = Tensor | tuple[Tensor, Tensor]  # with labels, if the flow is conditional


class FlowTraining(LightningModule):
    """Train a flow on pictures or points: the loss is bits per dimension, in a memory you choose.

    Logged for each epoch, for training (``train_``) and validation (``val_``), and for ``test_``:
    `bits_per_dim` and its two parts, `latent` and `log_det`, which add up to it; for points in the
    plane also `nats_per_point`, the mean of ``-log p(x)``.

    All randomness of a step (dequantization noise, dropout) follows from `seed`, the epoch and
    the number of the batch: a resumed run draws what the uninterrupted one would have drawn, and
    each epoch is validated with the same noise.

    A setting of the flow that is not given has the default of its builder; one that the flow does
    not have is an error.

    Args:
        shape: Shape ``(C, H, W)`` of a picture, or ``(2,)`` of points.
        levels: Number of grey levels; None for points.
        num_classes: Number of classes of the data, if the flow is conditional.
        flow: Which flow.
        conditional: Whether the density is that of a class: the data need labels.
        num_levels: Number of scales; H and W are halved at each.
        num_steps: Number of steps of the flow at each scale.
        num_couplings: Number of couplings, for nice.
        width: Channels inside the networks.
        depth: Depth of the networks, for all but glow.
        coupling: Kind of coupling, for glow.
        dropout: Probability of dropout inside the networks.
        num_components: Number of logistics that are mixed, for flowpp.
        alpha: Margin of the logit that comes first, for pictures and all but nice.
        variational: Whether the noise of dequantization is learned, for flowpp.
        coefficient: Bound on the Lipschitz constant of a block, for iresnet.
        log_det: How the log-determinant is computed, for iresnet.
        exact: Whether couplings are inverted to the bit, for nice.
        memory: What backward remembers: "linear", "sqrt", "log", "constant" or a number of slots.
        optimizer: The optimizer.
        learning_rate: The learning rate after the warm-up.
        num_warmup_steps: Number of steps in which the learning rate rises from 0.
        num_decay_steps: Number of the step at which the learning rate, falling along a cosine, has
            reached 0; None to let it stay.
        seed: Seed of the draws of all steps.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        levels: int | None,
        num_classes: int | None = None,
        flow: FlowName = "glow",
        conditional: bool = False,
        num_levels: int | None = None,
        num_steps: int | None = None,
        num_couplings: int | None = None,
        width: int | None = None,
        depth: int | None = None,
        coupling: Literal["affine", "additive"] | None = None,
        dropout: float | None = None,
        num_components: int | None = None,
        alpha: float | None = None,
        variational: bool | None = None,
        coefficient: float | None = None,
        log_det: Literal["exact", "series", "unbiased"] | None = None,
        exact: bool | None = None,
        memory: int | str = "linear",
        optimizer: Literal["adam", "adamax"] = "adam",
        learning_rate: float = 1e-3,
        num_warmup_steps: int = 50,
        num_decay_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        check_not_negative(**{"--model.learning_rate": learning_rate})
        check_at_least(0, **{"--model.num_warmup_steps": num_warmup_steps})
        check_at_least(1, **{"--model.num_decay_steps": num_decay_steps})
        self.flow = build_flow(
            flow,
            shape,
            levels=levels,
            num_classes=num_classes,
            memory=memory,
            settings={name: self.hparams[name] for name in FLOW_SETTINGS},
        )

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
        torch.manual_seed(seed_at(self.hparams["seed"], self.global_rank, *key))

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and the schedule that sets its learning rate for each step."""
        kind = {"adam": torch.optim.Adam, "adamax": torch.optim.Adamax}[self.hparams["optimizer"]]
        optimizer = kind(self.flow.parameters(), lr=self.hparams["learning_rate"])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _rate(self, step: int) -> float:
        """Return the factor on the learning rate at the step with this number."""
        rate = min(1.0, (step + 1) / max(1, self.hparams["num_warmup_steps"]))
        num_decay_steps = self.hparams["num_decay_steps"]
        if num_decay_steps is not None:
            rate *= 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / num_decay_steps))
        return rate
