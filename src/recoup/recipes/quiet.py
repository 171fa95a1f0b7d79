"""Silencing Lightning's messages about itself."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["quiet_lightning"]


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
