"""Progress of a run: a bar and a line for each epoch on the screen, and a row in a file."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich import progress as bars
from rich.console import Console

from recoup.memory.whole_files import write_whole

__all__ = ["LossRecord", "MetricsFile", "Progress", "progress_bar"]


class _EpochMetrics(Callback):
    """The metrics of an epoch, without those of an earlier validation."""

    _validated_epoch: int | None = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the epoch was validated."""
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


class Progress(_EpochMetrics):
    """A bar over all steps of the run, and a line for each epoch that has been validated.

    Args:
        monitor: The metric of the validation that is shown first, ``val_`` and its name.
        title: The text before the bar.
        lines: Whether there is a line for each epoch.
    """

    def __init__(self, monitor: str, *, title: str = "training", lines: bool = True) -> None:
        self._monitor = monitor
        self._title = title
        self._lines = lines
        self._bar: bars.Progress | None = None
        self._task = bars.TaskID(0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the bar."""
        if not trainer.is_global_zero:
            return
        self._bar = progress_bar()
        self._task = self._bar.add_task(
            self._title, total=None, completed=trainer.global_step, note=""
        )
        self._bar.start()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the total number of steps, assuming that all epochs have as many as this one."""
        estimated, num_epochs = trainer.estimated_stepping_batches, trainer.max_epochs
        if self._bar is None or num_epochs is None or estimated == float("inf"):
            return
        left = estimated / num_epochs * (num_epochs - trainer.current_epoch)
        self._bar.update(self._task, total=trainer.global_step + left)

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the metrics of the epoch."""
        metrics = self.metrics(trainer)
        if self._bar is None or self._monitor not in metrics:
            return
        name = self._monitor.removeprefix("val_")
        self._bar.update(self._task, note=f"{_words(name)} {metrics[self._monitor]:.3f}")
        if self._lines:
            line = f"epoch {trainer.current_epoch + 1:>3}: {', '.join(self._parts(metrics))}"
            self._bar.console.print(line, highlight=False, soft_wrap=True)

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

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the bar."""
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove the bar, so that the error can be read."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


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
