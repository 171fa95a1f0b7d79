"""Lightning without messages about itself: for all of a run, and to test a trained model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

__all__ = ["evaluated_metrics", "quiet_lightning", "quiet_trainer"]


@contextmanager
def quiet_lightning() -> Generator[None]:
    """Silence Lightning's messages about itself; warnings about the run are still shown."""
    loggers = [logging.getLogger(f"lightning.{part}") for part in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        with warnings.catch_warnings():
            # Batches come from memory: workers would make them slower.
            warnings.filterwarnings("ignore", message=".*does not have many workers")
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists")
            # cuDNN copies weights that each forward computes, which cannot be avoided.
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
            # lightning 2.6 uses torch's tree specifications in a way that torch 2.13 deprecates.
            warnings.filterwarnings("ignore", message=".isinstance.treespec, LeafSpec")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


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


def evaluated_metrics(trainer: Trainer, model: LightningModule, data: Any) -> Mapping[str, float]:
    """Return the metrics that a model logs over a data module's test part, or over batches."""
    with quiet_lightning(), torch.no_grad():
        return trainer.test(model, data, verbose=False)[0]
