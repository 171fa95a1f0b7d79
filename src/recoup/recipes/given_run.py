"""A training run of objects, which Python gives where a command has arguments."""

from __future__ import annotations

import difflib
import inspect
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from numbers import Integral
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from recoup.recipes.checks import check_at_least
from recoup.recipes.progress import Progress
from recoup.recipes.quiet import quiet_lightning
from recoup.recipes.results import Step, results_of, write_results
from recoup.recipes.run_folder import checkpoint_folder, folder_locked
from recoup.recipes.training_run import CHECKPOINT, EARLY_STOPPING, TRAINER, TrainingRun

__all__ = ["GivenRun", "check_given", "fitted"]


class GivenRun(TrainingRun):
    """A training run of objects, in this process.

    Args:
        model: The Lightning module.
        data: Its data.
        monitor: The metric whose lowest value marks the best checkpoint.
        epochs: The most epochs.
        patience: Number of epochs without a better validation after which training ends.
        out: The folder of the run.
        trainer: Further arguments of the Trainer.

    Raises:
        ValueError: When the run would train nothing, or in several processes.
    """

    def __init__(
        self,
        model: LightningModule,
        data: LightningDataModule,
        *,
        monitor: str,
        epochs: int,
        patience: int,
        out: Path,
        trainer: Mapping[str, Any],
    ) -> None:
        for name, value in {"epochs": epochs, "patience": patience}.items():
            if value is None:  # pyright: ignore[reportUnnecessaryComparison]
                raise ValueError(f"`{name}` is None, but must be a whole number.")
        check_at_least(1, epochs=epochs, patience=patience)
        _check_not_set(trainer, max_epochs="epochs", default_root_dir="out")
        self.model = model
        self.datamodule = data
        self.monitor = monitor
        given: dict[str, Any] = {**TRAINER, "devices": 1, **trainer}
        given |= {"max_epochs": epochs, "default_root_dir": out}
        callbacks = given.pop("callbacks", None) or []
        callbacks = [callbacks] if isinstance(callbacks, Callback) else callbacks
        folder = checkpoint_folder(out)
        saving = ModelCheckpoint(folder, monitor=monitor, **CHECKPOINT)
        settings: dict[str, Any] = {**EARLY_STOPPING, "patience": patience}
        stopping = EarlyStopping(monitor, **settings)
        with quiet_lightning():
            self.trainer = Trainer(**given, callbacks=[*callbacks, saving, stopping])
        if self.trainer.world_size > 1:
            raise ValueError(
                f"`trainer` asks for {self.trainer.world_size} processes, but a call trains in one."
                " Train by the command, which starts others with `--trainer.devices`."
            )


def check_given(
    steps: type[LightningModule],
    fit: Callable[..., object],
    *,
    seed: object,
    trainer: object,
    settings: Mapping[str, Any],
) -> None:
    """Raise an error if what a call of `fit` was given is not what it takes.

    Args:
        steps: The class that takes the settings.
        fit: The function that was called, whose arguments may be meant.
        seed: The seed of the run.
        trainer: Further arguments of the Trainer.
        settings: Settings by name.

    Raises:
        TypeError: When there is no such setting.
        ValueError: When the seed is no whole number, or the arguments are no mapping.
    """
    if not isinstance(seed, Integral):
        raise ValueError(f"`seed` is {seed!r}, but must be a whole number.")
    if not isinstance(trainer, (Mapping, NoneType)):
        raise ValueError(
            f"`trainer` is {trainer!r}, but must be a dictionary of arguments of Lightning's "
            'Trainer, such as {"accelerator": "cpu"}.'
        )
    known = inspect.signature(steps).parameters
    for name in settings:
        if name not in known:
            meant = [*known, *inspect.signature(fit).parameters]
            near = difflib.get_close_matches(name, meant, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise TypeError(f"`fit` has no argument `{name}`.{hint}")


def fitted(
    model: LightningModule,
    data: LightningDataModule,
    *,
    module: torch.nn.Module,
    monitor: str,
    step: Step,
    epochs: int,
    patience: int,
    out: str | PathLike[str] | None,
    progress: bool,
    trainer: Mapping[str, Any],
    memory: object,
    check: Callable[[TrainingRun], None] = lambda run: None,
) -> dict[str, Any]:
    """Train, test and measure as the command does; return what it writes to ``run.json``.

    The weights that were best in validation are left in the model, in evaluation mode, and on the
    device and in the type that it was in. The random stream of the caller is as before.

    Args:
        model: The Lightning module.
        data: Its data.
        module: The user's module, which the Lightning module trains.
        monitor: The metric whose lowest value marks the best checkpoint.
        step: Makes the step to measure.
        epochs: The most epochs.
        patience: Number of epochs without a better validation after which training ends.
        out: A new folder for checkpoints, metrics and results; nothing is kept if None.
        progress: Whether progress is shown on stderr.
        trainer: Further arguments of the Trainer.
        memory: The memory mode, to be named in the results.
        check: Raises a ValueError if the recipe does not support the run.

    Raises:
        ValueError: When an argument does not fit; it is named.
        KeyboardInterrupt: When a signal ended the training, after a step.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            f"No parameter of the {type(module).__name__} requires a gradient, so there is nothing "
            "to train: call `requires_grad_(True)` on what is to be trained."
        )
    before = next(module.parameters())
    device, dtype = before.device, before.dtype
    with _folder(out) as folder, _random_stream_kept():
        run = GivenRun(
            model,
            data,
            monitor=monitor,
            epochs=epochs,
            patience=patience,
            out=folder,
            trainer=trainer,
        )
        check(run)
        module.train()
        try:
            run.train(*([Progress(monitor)] if progress else []))
            if run.stopping.signum is not None:
                raise KeyboardInterrupt
            results = results_of(run, step, memory=str(memory))
        finally:
            module.to(device).eval()
            if next(module.parameters()).dtype is not dtype:  # `precision` of the Trainer
                module.to(dtype)
        if results is None:
            raise ValueError("`trainer` limits training to no epoch. Leave its limits out.")
        if out is not None:
            write_results(run, results)
    return results


def _check_not_set(trainer: Mapping[str, Any], **arguments: str) -> None:
    """Raise a ValueError if the Trainer is given a setting that is an argument of its own."""
    for setting, argument in arguments.items():
        if setting in trainer:
            raise ValueError(
                f"`trainer` has `{setting}`, which is the argument `{argument}`. Give that."
            )


@contextmanager
def _folder(out: str | PathLike[str] | None) -> Generator[Path]:
    """Give the folder of a run, which no other run writes to; a temporary one if `out` is None."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="recoup-") as folder:
            yield Path(folder)
        return
    if not isinstance(out, (str, PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"`out` is {out!r}, but must be the path of a new folder.")
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"`out` is {folder}, which is not empty. Give a new folder.")
    with folder_locked(folder, "out"):
        yield folder


@contextmanager
def _random_stream_kept() -> Generator[None]:
    """Restore the states of the default generators, which each step seeds."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield
