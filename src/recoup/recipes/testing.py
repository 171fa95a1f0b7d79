"""The parts shared by the commands ``evaluate`` of all recipes: Lightning's test loop alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from recoup.recipes.quiet import quiet_lightning

__all__ = ["is_same_path", "quiet_trainer", "tested"]


def quiet_trainer(accelerator: str) -> Trainer:
    """Return a Trainer that tests on one device and writes no files.

    Args:
        accelerator: Where to run: auto, cpu or gpu.
    """
    return Trainer(
        accelerator=accelerator,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def tested(trainer: Trainer, model: LightningModule, data: Any) -> Mapping[str, float]:
    """Return the metrics that a model logs over a data module's test part, or over batches."""
    with quiet_lightning(), torch.no_grad():
        return trainer.test(model, data, verbose=False)[0]


def is_same_path(data: str, trained_on: str | None) -> bool:
    """Return whether `data` is the path of the data that a model was trained on."""
    return trained_on is not None and Path(data).resolve() == Path(trained_on).resolve()
