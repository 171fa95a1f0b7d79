"""The command ``fit`` of every recipe: a prepared run, trained until it ends or is stopped."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from recoup.errors import BudgetError
from recoup.recipes.mistakes import mistakes_reported, one_line
from recoup.recipes.preparation import PreparedRun
from recoup.recipes.progress import Progress
from recoup.recipes.results import write_results
from recoup.recipes.run_folder import check_no_run, folder_locked, relative
from recoup.recipes.settings import CONFIG_FILE
from recoup_cli import MistakeError
from recoup_cli.mistakes import StoppedError

__all__ = ["TrainingCLI", "fit_command"]


class TrainingCLI(PreparedRun):
    """A training run, prepared from its command line; `fit` runs it. See `PreparedRun`."""

    def fit(
        self, *callbacks: Callback, progress: Progress | None = None, opening: str | None = None
    ) -> None:
        """Train, and write the results of the run to `out`.

        Args:
            callbacks: Callbacks for this run beside those of the configuration.
            progress: The display of progress; a bar and a line for each epoch if None.
            opening: Text to print once all checks have passed.

        Raises:
            MistakeError: When another run writes to the folder, no plan keeps to the bytes of
                `--memory`, or the disk is full.
            StoppedError: When a signal ended the run.
        """
        self.checkpoint = None  # Its tensors would stay in memory.
        with self._own_folder():
            if opening is not None and self.trainer.is_global_zero:
                print(opening)
            try:
                self.train(progress or Progress(self.monitor), *callbacks)
            except Exception as error:
                self._report(error)
                raise
            if self.stopping.signum is not None:
                self._forget_an_empty_run()
                raise StoppedError(self._stopped_at(), 128 + self.stopping.signum)

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

    def _report(self, error: Exception) -> None:
        """Raise a one-line MistakeError if the error is no fault of the program."""
        if isinstance(error, OSError):  # such as a full disk
            raise MistakeError(f"{one_line(error)} {self._go_on()}", 1) from error
        if isinstance(error, BudgetError):  # A chain makes its plan in its first step.
            self._forget_an_empty_run()
            said = one_line(error)
            for name in ("`budget`", "`memory`"):  # of a MemoryBudget, of a chain
                said = said.replace(name, "`--memory`", 1)
            raise MistakeError(said) from error
        if self.stopping.has_begun:
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
        if self.last.num_epochs:
            return self.saved_to / "last.ckpt"
        return None if self.resume is None else Path(self.resume)

    def _stopped_at(self) -> str:
        path, num_epochs = self._resumable, self.last.num_epochs or self._num_epochs_before
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


def fit_command(
    args: Sequence[str],
    *,
    prepare: Callable[[Sequence[str]], TrainingCLI],
    description: Callable[[TrainingCLI], str],
    score: str,
    results: Callable[[TrainingCLI], dict[str, Any] | None],
) -> int:
    """Run the command ``fit`` of a recipe, and write its results to ``run.json``.

    Args:
        args: The arguments, without the name of the command.
        prepare: Prepares a run from the arguments.
        description: Returns the text to print before the run begins.
        score: Format string for the score of the best validation, and of the test.
        results: Tests the finished run, on all ranks. See `results_of`.

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
    found = results(run)
    if found is not None:
        tested = found.get(run.monitor.replace("val_", "test_", 1))
        test = "" if tested is None else f"test: {score.format(tested)}; "
        print(f"{test}results: {write_results(run, found)}")
    return 0
