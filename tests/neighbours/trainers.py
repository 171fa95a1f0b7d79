"""A trainer of Lightning that writes nothing, for the tests of several rooms."""

from __future__ import annotations

from typing import Any

import lightning

_WRITES = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def lightning_trainer(folder: Any, *callbacks: Any, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        default_root_dir=folder, callbacks=list(callbacks), accelerator="cpu", devices=1,
        **dict.fromkeys(_WRITES, False), **options,
    )  # fmt: skip
