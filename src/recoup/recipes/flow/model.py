"""What is trained: a Glow, its loss in bits per dimension, and how its weights move."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from recoup.flows import Glow
from recoup.recipes.draws import seed_at

__all__ = ["FlowTraining"]


class FlowTraining(LightningModule):
    """Train a Glow on pictures: the loss is bits per dimension, in a memory of your choice.

    Logged for each epoch, for training (``train_``) and validation (``val_``), and for ``test_``:
    `bits_per_dim` and its two parts, `latent` and `log_det`, which add up to it.

    All randomness of a step (dequantization noise, dropout) follows from `seed`, the epoch and
    the number of the batch: a resumed run draws what the uninterrupted one would have drawn, and
    each epoch is validated with the same noise.

    Args:
        shape: Shape ``(C, H, W)`` of a picture.
        levels: Number of grey levels.
        num_levels: Number of scales; H and W are halved at each.
        num_steps: Number of steps of the flow at each scale.
        width: Channels inside the networks of the couplings.
        coupling: Kind of coupling.
        dropout: Probability of dropout inside the networks of the couplings.
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
        shape: tuple[int, int, int],
        levels: int,
        num_levels: int = 2,
        num_steps: int = 8,
        width: int = 64,
        coupling: Literal["affine", "additive"] = "affine",
        dropout: float = 0.0,
        memory: int | str = "linear",
        optimizer: Literal["adam", "adamax"] = "adam",
        learning_rate: float = 1e-3,
        num_warmup_steps: int = 50,
        num_decay_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        _check_sides(shape, num_levels)
        self.flow = Glow(
            shape,
            levels=levels,
            num_levels=num_levels,
            num_steps=num_steps,
            width=width,
            coupling=coupling,
            dropout=dropout,
            memory=memory,  # pyright: ignore[reportArgumentType]  # the flow checks its name
        )
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.num_warmup_steps = num_warmup_steps
        self.num_decay_steps = num_decay_steps
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        """Return the bits per dimension ``(N,)`` of pictures ``(N, C, H, W)``."""
        return self.flow.bits_per_dim(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of a batch: its mean bits per dimension."""
        return self._step("train", batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log what the batch costs to code."""
        self._step("val", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log what the batch costs to code."""
        self._step("test", batch)

    def _step(self, stage: str, batch: Tensor) -> Tensor:
        parts = {name: bits.mean() for name, bits in self.flow.parts(batch).items()}
        loss = torch.stack(list(parts.values())).sum()
        self.log_dict(
            {f"{stage}_{name}": bits.detach() for name, bits in parts.items()}
            | {f"{stage}_bits_per_dim": loss.detach()},
            on_step=False,
            on_epoch=True,
            batch_size=len(batch),
            sync_dist=True,
        )
        return loss

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        """Seed the draws of this step."""
        self._seed("train", self.current_epoch, batch_idx)

    def on_validation_batch_start(
        self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Seed the draws of this batch, alike in each epoch."""
        self._seed("val", batch_idx)

    def on_test_batch_start(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Seed the draws of this batch."""
        self._seed("test", batch_idx)

    def _seed(self, *place: str | int) -> None:
        torch.manual_seed(seed_at(self.seed, self.global_rank, *place))

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with its learning rate set anew for each step."""
        kind = {"adam": torch.optim.Adam, "adamax": torch.optim.Adamax}[self.optimizer]
        optimizer = kind(self.flow.parameters(), lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _rate(self, step: int) -> float:
        """Part of the learning rate that the step with this number is taken with."""
        rate = min(1.0, (step + 1) / max(1, self.num_warmup_steps))
        if self.num_decay_steps is not None:
            rate *= 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / self.num_decay_steps))
        return rate


def _check_sides(shape: tuple[int, int, int], num_levels: int) -> None:
    factor = 2**num_levels if num_levels > 0 else 1
    height, width = shape[1:]
    if height % factor or width % factor:
        most = next(n for n in range(num_levels, -1, -1) if not (height % 2**n or width % 2**n))
        fewer = f", or use `--model.num_levels {most}`" if most else ""
        raise ValueError(
            f"The pictures are {width} x {height} pixels, but {num_levels} scales need sides that "
            f"are multiples of {factor}. Resize them with "
            f"`--data.size {max(factor, round(min(height, width) / factor) * factor)}`{fewer}."
        )
