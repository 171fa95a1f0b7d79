"""Progress of a run: Lightning's bar, with a line for each epoch, and a row in a file.

Lightning's CSVLogger does not write the file: it has a row for training and another for validation,
no seconds, and deletes the rows of a run that is resumed.
"""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Any

import rich
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar
from rich import progress as bars
from rich.console import Console

from recoup.memory.whole_files import write_whole

__all__ = ["LossRecord", "MetricsFile", "Progress", "progress_bar"]


class _EpochMetrics(Callback):
    """The metrics of an epoch, without those of an earlier validation."""

    _validated_epoch: int | None = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the epoch was validated."""
        super().on_validation_end(trainer, pl_module)
        if not trainer.sanity_checking:
            self._validated_epoch = trainer.current_epoch

    def metrics(self, trainer: Trainer) -> dict[str, float]:
        """Return the metrics of the epoch, by name."""
        return {
            name: float(value)
            for name, value in sorted(trainer.callback_metrics.items())
            if name.startswith("train_") or self._validated_epoch == trainer.current_epoch
        }


class MetricsFile(_EpochMetrics):
    """The writer of ``metrics.csv`` in the folder of the run: one row for each epoch.

    A resumed run keeps the rows of the epochs that it does not repeat.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, str]] = []
        self._start = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the rows of the epochs before this run."""
        self._start = time.perf_counter()
        path = self._path(trainer)
        if trainer.ckpt_path is not None and path.exists():
            with path.open(newline="") as file:
                self._rows = [
                    row for row in csv.DictReader(file) if int(row["epoch"]) < trainer.current_epoch
                ]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the row of the epoch."""
        if not trainer.is_global_zero:
            return
        metrics = {name: f"{value:.6f}" for name, value in self.metrics(trainer).items()}
        row = {"epoch": str(trainer.current_epoch), "step": str(trainer.global_step)}
        seconds = {"seconds": f"{time.perf_counter() - self._start:.2f}"}
        self._rows.append({**row, **metrics, **seconds})
        text = io.StringIO()
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        write_whole(self._path(trainer), text.getvalue().encode())

    def _path(self, trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir, "metrics.csv")


class LossRecord(Callback):
    """A record of the loss of each step, in `losses`."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any, **__: Any
    ) -> None:
        """Record the loss."""
        self.losses.append(float(outputs["loss"]))


class Progress(_EpochMetrics, RichProgressBar):
    """Lightning's bar on stderr, and a line for each epoch that has been validated, which stays.

    Lightning's own has no such lines, and counts epochs from 0.

    Args:
        monitor: The metric of the validation that is shown first, ``val_`` and its name.
        title: The text before the number of the epoch.
        lines: Whether there is a line for each epoch.
    """

    def __init__(self, monitor: str, *, title: str = "epoch", lines: bool = True) -> None:
        super().__init__(refresh_rate=10, console_kwargs={"stderr": True})
        self._monitor = monitor
        self._title = title
        self._lines = lines

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the metrics of the epoch."""
        super().on_train_epoch_end(trainer, pl_module)
        metrics = self.metrics(trainer)
        if self._lines and self.progress is not None and self._monitor in metrics:
            line = f"epoch {trainer.current_epoch + 1:>3}: {', '.join(self._parts(metrics))}"
            self.progress.console.print(line, highlight=False, soft_wrap=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the bar; rich's own console, which Lightning sends to stderr, is as before."""
        super().teardown(trainer, pl_module, stage)
        rich.reconfigure()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove the bar, so that the error can be read."""
        super().on_exception(trainer, pl_module, exception)
        rich.reconfigure()

    def _parts(self, metrics: dict[str, float]) -> list[str]:
        """Return the parts of the line of an epoch: validation first, then training and others."""
        validated = [name for name in metrics if name.startswith("val_") and name != self._monitor]
        parts = [
            f"{_words(name.removeprefix('val_'))} {metrics[name]:.3f}"
            for name in [self._monitor, *validated]
        ]
        train = metrics.get(self._monitor.replace("val_", "train_", 1))
        parts += [] if train is None else [f"training {train:.3f}"]
        stages = ("train_", "val_", "test_")
        parts += [
            f"{_words(name)} {value:g}"
            for name, value in metrics.items()
            if not name.startswith(stages) and value
        ]
        return parts

    def _get_train_description(self, current_epoch: int) -> str:
        most = self.trainer.max_epochs
        return f"{self._title} {current_epoch + 1}" + (f"/{most}" if most and most > 0 else "")


def _words(name: str) -> str:
    """Return the readable name of a metric: bits/dim for bits_per_dim."""
    return name.replace("_per_", "/").replace("_", "-")


def progress_bar() -> bars.Progress:
    """Return a bar with a title, a count, the time left and a note; it writes to stderr."""
    return bars.Progress(
        bars.TextColumn("{task.description:>10}"),
        bars.BarColumn(bar_width=32),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )
