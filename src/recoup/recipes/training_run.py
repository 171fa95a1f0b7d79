"""A training run of any recipe, trained until it ends or a signal stops it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback

from recoup.recipes.progress import MetricsFile
from recoup.recipes.quiet import quiet_lightning
from recoup.recipes.run_folder import WholeCheckpoints, WholeEpochs, relative
from recoup.recipes.stopping import Stopping, StopRun

__all__ = ["CHECKPOINT", "EARLY_STOPPING", "TRAINER", "TrainingRun"]

# Settings of every run that are not Lightning's.
TRAINER: dict[str, Any] = {
    "max_epochs": 30,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
CHECKPOINT: dict[str, Any] = {"filename": "best", "enable_version_counter": False}
EARLY_STOPPING: dict[str, Any] = {
    "patience": 20,
    "strict": False,
}  # A run may be too short to validate.


class TrainingRun:
    """A training run: a model, its data and a Trainer, whose checkpoints go to a folder.

    `PreparedRun` is one from a command line, `GivenRun` one of objects.

    Attributes:
        model: The Lightning module.
        datamodule: Its data.
        trainer: The Trainer.
        monitor: The metric whose lowest value marks the best checkpoint.
        resume: Path of the checkpoint to go on from; None to begin.
        last: The callback that saves the last whole epoch, once training has begun.
        stopping: The callback that ends the run at a signal, once training has begun.
    """

    model: Any
    datamodule: Any
    trainer: Any
    monitor: str
    resume: str | None = None
    last: WholeEpochs
    stopping: Stopping

    @property
    def out(self) -> Path:
        """The folder of the run."""
        return Path(self.trainer.default_root_dir)

    @property
    def saved_to(self) -> Path:
        """The folder of its checkpoints."""
        return Path(self.trainer.checkpoint_callback.dirpath)

    @property
    def num_threads(self) -> int | None:
        """Number of threads on CPU; None for that of torch."""
        return None

    @property
    def best(self) -> tuple[Path, float] | None:
        """The checkpoint with the best validation, and its value; None before the first."""
        callback = self.trainer.checkpoint_callback
        if callback is None or callback.best_model_score is None:
            return None
        return relative(Path(callback.best_model_path)), float(callback.best_model_score)

    def train(self, *callbacks: Callback) -> None:
        """Train, with checkpoints and ``metrics.csv``, until the end or a signal (`stopping`).

        Args:
            callbacks: Callbacks beside those of the Trainer.
        """
        trainer = self.trainer
        # A callback of its own: `save_last` of the other writes only when there is a new best.
        self.last = WholeEpochs(
            self.saved_to,
            filename="last",
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self.stopping = Stopping()
        # Callbacks that stop come after those that save.
        trainer.callbacks += [MetricsFile(), *callbacks, self.last, self.stopping]
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeCheckpoints()
        with self.threads(), quiet_lightning(), self.stopping.listening():
            try:
                trainer.fit(self.model, self.datamodule, ckpt_path=self.resume, weights_only=True)
            except (StopRun, SystemExit) as ending:
                if self.stopping.signum is None:
                    # Lightning exits where a callback raises a KeyboardInterrupt.
                    if isinstance(ending.__context__, KeyboardInterrupt):
                        raise KeyboardInterrupt from ending
                    raise

    @contextmanager
    def threads(self) -> Generator[None]:
        """Set the number of threads of the run within the context."""
        num_threads = torch.get_num_threads()
        try:
            torch.set_num_threads(self.num_threads or num_threads)
            yield
        finally:
            torch.set_num_threads(num_threads)
