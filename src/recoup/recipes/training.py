"""The command ``fit`` of every recipe: a prepared run, trained until it ends or is stopped."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback

from recoup.recipes.mistakes import mistakes_reported, one_line
from recoup.recipes.preparation import PreparedRun
from recoup.recipes.progress import MetricsFile, Progress
from recoup.recipes.quiet import quiet_lightning
from recoup.recipes.run_folder import (
    WholeCheckpoints,
    WholeEpochs,
    check_no_run,
    folder_locked,
    relative,
)
from recoup.recipes.settings import CONFIG_FILE
from recoup.recipes.stopping import Stopping, StopRun
from recoup_cli import MistakeError
from recoup_cli.mistakes import StoppedError

__all__ = ["TrainingCLI", "fit_command"]


class TrainingCLI(PreparedRun):
    """A training run, prepared from its command line; `fit` runs it. See `PreparedRun`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A callback of its own: `save_last` of the other writes only when there is a new best.
        self._last = WholeEpochs(
            self.saved_to,
            filename="last",
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )

    @property
    def best(self) -> tuple[Path, float] | None:
        """The checkpoint with the best validation, and its value; None before the first."""
        callback: Any = self.trainer.checkpoint_callback
        if callback is None or callback.best_model_score is None:
            return None
        return relative(Path(callback.best_model_path)), float(callback.best_model_score)

    def fit(
        self, *callbacks: Callback, progress: Progress | None = None, opening: str | None = None
    ) -> None:
        """Train, and write the results of the run to `out`.

        Args:
            callbacks: Callbacks for this run beside those of the configuration.
            progress: The display of progress; a bar and a line for each epoch if None.
            opening: Text to print once all checks have passed.

        Raises:
            MistakeError: When another run writes to the folder, or the disk is full.
            StoppedError: When a signal ended the run.
        """
        trainer: Any = self.trainer
        self.checkpoint = None  # Its tensors would stay in memory.
        shown = progress or Progress(self._monitor)
        stopping = Stopping()
        # Callbacks that stop come after those that save.
        trainer.callbacks += [MetricsFile(), shown, *callbacks, self._last, stopping]
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = WholeCheckpoints()
        with self._own_folder(), self.threads(), quiet_lightning(), stopping.listening():
            if opening is not None and trainer.is_global_zero:
                print(opening)
            try:
                trainer.fit(self.model, self.datamodule, ckpt_path=self.resume, weights_only=True)
            except (StopRun, SystemExit):
                if stopping.signum is None:
                    raise
            except Exception as error:
                self._report(error, stopping)
                raise
            if stopping.signum is not None:
                self._forget_an_empty_run()
                raise StoppedError(self._stopped_at(), 128 + stopping.signum)

    @contextmanager
    def _own_folder(self) -> Generator[None]:
        """Keep other runs from writing to the folders of this one."""
        folders = {self.out: "--out", self.saved_to: "--checkpoint.dirpath"}
        with ExitStack() as locks:
            if self.trainer.is_global_zero:
                with mistakes_reported():
                    for folder, option in folders.items():
                        locks.enter_context(folder_locked(folder, option))
                    if self.resume is None:
                        check_no_run(self.out)  # Another run may have written to it in between.
            yield

    def _report(self, error: Exception, stopping: Stopping) -> None:
        """Raise a one-line MistakeError if the error is no fault of the program."""
        if isinstance(error, OSError):  # such as a full disk
            raise MistakeError(f"{one_line(error)} {self._go_on()}", 1) from error
        if stopping.has_begun:
            return
        if self.resume is None:
            with mistakes_reported():
                raise error
        raise MistakeError(
            f"`--resume` is {self.resume}, from which a run cannot resume "
            f"({type(error).__name__}: {one_line(error)}). Start from its weights with "
            "`--finetune`."
        ) from error

    @property
    def _resumable(self) -> Path | None:
        """The checkpoint from which to resume; None before the first epoch ended."""
        if self._last.num_epochs:
            return self.saved_to / "last.ckpt"
        return None if self.resume is None else Path(self.resume)

    def _stopped_at(self) -> str:
        path, num_epochs = self._resumable, self._last.num_epochs or self._num_epochs_before
        if path is None or not num_epochs:
            return "stopped before the first epoch ended: nothing is kept. Begin again."
        if num_epochs == self.trainer.max_epochs:
            return f"stopped after epoch {num_epochs}, the last one: {relative(path)}"
        return f"stopped after epoch {num_epochs}; {self._go_on()}"

    def _go_on(self) -> str:
        path = self._resumable
        if path is None:
            return "No epoch had ended. Begin again."
        return f"go on with `recoup {self.recipe} fit --resume {shlex.quote(str(relative(path)))}`"

    def _forget_an_empty_run(self) -> None:
        """Remove the record of a run without an epoch, so that the same command can run again."""
        is_begun = self._resumable is not None or list(self.saved_to.glob("*.ckpt"))
        if self.trainer.is_global_zero and not is_begun:
            (self.out / CONFIG_FILE).unlink(missing_ok=True)

    @contextmanager
    def threads(self) -> Generator[None]:
        """Set the number of threads of the run within the context."""
        num_threads = torch.get_num_threads()
        try:
            torch.set_num_threads(self.config.num_threads or num_threads)
            yield
        finally:
            torch.set_num_threads(num_threads)


def fit_command(
    args: Sequence[str],
    *,
    prepare: Callable[[Sequence[str]], TrainingCLI],
    description: Callable[[TrainingCLI], str],
    score: str,
    finish: Callable[[TrainingCLI], None] | None = None,
) -> int:
    """Run the command ``fit`` of a recipe.

    Args:
        args: The arguments, without the name of the command.
        prepare: Prepares a run from the arguments.
        description: Returns the text to print before the run begins.
        score: Format string for the score of the best validation.
        finish: Called with the finished run, on all ranks.

    Returns:
        The exit code.
    """
    run = prepare(args)
    run.fit(opening=description(run))
    if run.trainer.is_global_zero:
        if run.best is not None:
            path, value = run.best
            print(f"best checkpoint: {path} ({score.format(value)} in validation)")
        print(f"metrics: {run.out / 'metrics.csv'}")
    if finish is not None:
        finish(run)
    return 0
