"""The command ``fit`` of every recipe: Lightning's command line, with short names and resume."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.mistakes import mistakes_reported, one_line
from recoup.recipes.progress import MetricsFile, Progress
from recoup.recipes.quiet import quiet_lightning
from recoup.recipes.run_folder import (
    WholeCheckpoints,
    WholeEpochs,
    check_no_run,
    checkpoint_folder,
    folder_locked,
    free_folder,
    relative,
    run_folder,
)
from recoup.recipes.settings import (
    COMMAND,
    CONFIG_FILE,
    SETTINGS,
    RunRecord,
    plain_settings,
    recorded_folders,
)
from recoup.recipes.stopping import Stopping, StopRun
from recoup_cli import MistakeError
from recoup_cli.fit_arguments import SHORT_NAMES, Fit, check_epochs, given_in, long_names
from recoup_cli.mistakes import StoppedError

__all__ = ["SHORT_NAMES", "TrainingCLI", "fit_command"]


class TrainingCLI(LightningCLI):
    """A training run, prepared from its command line; `fit` runs it.

    Nothing is written before `fit`: arguments, data, network and checkpoint are checked first.

    Args:
        model_class: The Lightning module of the recipe.
        data_class: Its data module.
        recipe: Name of the recipe, for messages and for where runs go: ``runs/<recipe>/fit-1``.
        fit: Its short names and configurations.
        links: Pairs of names: a property of the data, and the setting of the model that it sets.
        monitor: The metric whose lowest value marks the best checkpoint.
        args: The arguments, without the name of the command.
        trainer_defaults: Settings of the Trainer that are not Lightning's.
        finetuning: Settings of the model that ``--finetune`` changes.

    Attributes:
        checkpoint: The checkpoint to begin with, of ``--resume`` or ``--finetune``, until training
            begins; None without one.
        resume: The path given as ``--resume``; None if there is none.

    Raises:
        MistakeError: When the user has to correct something.
    """

    def __init__(
        self,
        model_class: type[LightningModule],
        data_class: type[LightningDataModule],
        *,
        recipe: str,
        fit: Fit,
        links: Sequence[tuple[str, str]],
        monitor: str,
        args: Sequence[str],
        trainer_defaults: Mapping[str, Any] | None = None,
        finetuning: Mapping[str, Any] | None = None,
    ) -> None:
        self.recipe = recipe
        self.checkpoint: Checkpoint | None = None
        self.resume: str | None = None
        self._num_epochs_before = 0
        self._options_of = {"model": model_class, "data": data_class}
        self._finetuning = finetuning or {}
        self._links = links
        self._monitor = monitor
        with quiet_lightning(), mistakes_reported():
            super().__init__(
                model_class,
                data_class,
                save_config_callback=RunRecord,
                save_config_kwargs={"save_to_log_dir": False},
                trainer_defaults={
                    "max_epochs": 30,
                    "logger": False,
                    "enable_progress_bar": False,
                    "enable_model_summary": False,
                    "num_sanity_val_steps": 0,
                    **(trainer_defaults or {}),
                },
                seed_everything_default=0,
                parser_kwargs={
                    "prog": f"recoup {recipe} fit",
                    "usage": f"recoup {recipe} fit [options]",
                    "description": (model_class.__doc__ or "").strip().splitlines()[0],
                    "exit_on_error": False,
                },
                args=long_names(args, fit),
                run=False,
                auto_configure_optimizers=False,
            )
            if self.checkpoint is not None:
                self.checkpoint.check_same_network(self.model)
                if self.resume is not None:
                    self._num_epochs_before = self.checkpoint.check_resumable(
                        self.model, self.trainer.max_epochs
                    )
                else:
                    self.model.load_state_dict(self.checkpoint.contents["state_dict"])
            if self.resume is None:
                check_no_run(self.out)

    @property
    def out(self) -> Path:
        """The folder of the run."""
        return Path(self.trainer.default_root_dir)

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
        # A callback of its own: `save_last` of the other writes only when there is a new best.
        last = WholeEpochs(
            self.config.checkpoint.dirpath,
            filename="last",
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        shown = progress or Progress(self._monitor)
        stopping = Stopping()
        # Callbacks that stop come after those that save.
        trainer.callbacks += [MetricsFile(), shown, *callbacks, last, stopping]
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
                self._report(error, stopping, last)
                raise
            if stopping.signum is not None:
                self._forget_an_empty_run(last)
                raise StoppedError(self._stopped_at(last), 128 + stopping.signum)

    @contextmanager
    def _own_folder(self) -> Generator[None]:
        """Keep other runs from writing to the folders of this one."""
        saved_to = Path(self.config.checkpoint.dirpath)
        folders = {self.out: "--out", saved_to: "--checkpoint.dirpath"}
        with ExitStack() as locks:
            if self.trainer.is_global_zero:
                with mistakes_reported():
                    for folder, option in folders.items():
                        locks.enter_context(folder_locked(folder, option))
                    if self.resume is None:
                        check_no_run(self.out)  # Another run may have written to it in between.
            yield

    def _report(self, error: Exception, stopping: Stopping, last: WholeEpochs) -> None:
        """Raise a one-line MistakeError if the error is no fault of the program."""
        if isinstance(error, OSError):  # such as a full disk
            raise MistakeError(f"{one_line(error)} {self._go_on(last)}", 1) from error
        if stopping.has_begun:
            return
        if self.resume is None:
            with mistakes_reported():
                raise error
        raise MistakeError(
            f"`--resume` is {self.resume}, with which a run cannot be gone on "
            f"({type(error).__name__}: {one_line(error)}). Begin with its weights by `--finetune`."
        ) from error

    def _stopped_at(self, last: WholeEpochs) -> str:
        num_epochs = last.num_epochs or self._num_epochs_before
        if not num_epochs:
            return "stopped before the first epoch ended: nothing is kept. Begin again."
        if num_epochs == self.trainer.max_epochs:
            return f"stopped after epoch {num_epochs}, the last one: {relative(self._last(last))}"
        return f"stopped after epoch {num_epochs}; {self._go_on(last)}"

    def _go_on(self, last: WholeEpochs) -> str:
        if not last.num_epochs and self.resume is None:
            return "No epoch had ended. Begin again."
        path = shlex.quote(str(relative(self._last(last))))
        return f"go on with `recoup {self.recipe} fit --resume {path}`"

    def _last(self, last: WholeEpochs) -> Path:
        """Return the checkpoint from which to resume."""
        if last.num_epochs or self.resume is None:
            return Path(self.config.checkpoint.dirpath, "last.ckpt")
        return Path(self.resume)

    def _forget_an_empty_run(self, last: WholeEpochs) -> None:
        """Remove the record of a run without an epoch, so that the same command can run again."""
        saved_to = Path(self.config.checkpoint.dirpath)
        is_begun = last.num_epochs or self.resume is not None or list(saved_to.glob("*.ckpt"))
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

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options that Lightning's command line does not have."""
        parser.add_argument(
            "--resume",
            type=str | None,
            default=None,
            metavar="CKPT",
            help="Go on from this checkpoint, with its settings, in its folder.",
        )
        parser.add_argument(
            "--finetune",
            type=str | None,
            default=None,
            metavar="CKPT",
            help="Begin a new run with the weights of this checkpoint, and its settings.",
        )
        parser.add_argument(
            "--num_threads",
            type=int | None,
            default=None,
            help="Threads on CPU. One is fastest for small networks, or on a shared machine.",
        )
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": self._monitor,
                "checkpoint.filename": "best",
                "checkpoint.enable_version_counter": False,
            }
        )
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        parser.set_defaults(
            {
                "early_stopping.monitor": self._monitor,
                "early_stopping.patience": 20,
                "early_stopping.strict": False,  # A run may be too short to validate.
            }
        )
        parser.link_arguments("seed_everything", "data.seed")
        parser.link_arguments("seed_everything", "model.seed")
        for source, target in self._links:
            parser.link_arguments(source, target, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, with the settings of the run's first checkpoint as defaults."""
        finetune = self._take(parser.parse_args(args))
        if self.resume is not None and finetune is not None:
            raise ValueError("`--resume` and `--finetune` are both given. Give one of them.")
        if self.resume is not None:
            self.checkpoint = Checkpoint(self.resume, "--resume")
        elif finetune is not None:
            self.checkpoint = Checkpoint(finetune, "--finetune")
        else:
            return
        source = f"`{self.checkpoint.option}` is {self.checkpoint.path}, which"
        writer = self.checkpoint.contents.get(COMMAND, parser.prog)
        if writer != parser.prog:
            raise ValueError(f"{source} `{writer}` wrote. Give one that `{parser.prog}` did.")
        recorded = self.checkpoint.contents.get(SETTINGS)
        if recorded is None:
            return
        settings = plain_settings(
            recorded,
            owners=self._options_of,
            source=source,
            is_given=lambda setting: given_in(args, setting),
        )
        if self.resume is None:
            settings.setdefault("model", {}).update(self._finetuning)
        else:
            self._stay_in_place(settings, recorded, args)
        self._take(parser.parse_args(["--config", yaml.safe_dump(settings), *args]))

    def _stay_in_place(self, settings: Any, recorded: Any, args: Sequence[str]) -> None:
        """Resume in the folder in which the checkpoint lies now."""
        checkpoint = Path(self.resume or "")
        folders = recorded_folders(recorded)
        if folders is None or folders[1] == checkpoint_folder(folders[0]):
            settings.setdefault("trainer", {})["default_root_dir"] = str(run_folder(checkpoint))
        elif given_in(args, "trainer.default_root_dir"):
            settings.setdefault("checkpoint", {})["dirpath"] = str(checkpoint.parent)
        else:
            raise ValueError(
                f"`--resume` is {checkpoint}, of a run that did not save in its own folder, which a"
                " checkpoint does not choose. Give that folder by `--out`."
            )

    def _take(self, config: Any) -> str | None:
        """Take over a configuration; return the path given as ``--finetune``."""
        self.config: Any = config
        self.resume = config.pop("resume")
        return config.pop("finetune")

    def before_instantiate_classes(self) -> None:
        """Choose the folders of the run, and check its length and threads."""
        trainer = self.config.trainer
        if trainer.default_root_dir is None:
            trainer.default_root_dir = str(free_folder(Path("runs", self.recipe), "fit"))
        if self.config.checkpoint.dirpath is None:
            self.config.checkpoint.dirpath = str(checkpoint_folder(trainer.default_root_dir))

        self._check_length()
        if self.config.num_threads is not None and self.config.num_threads < 1:
            raise ValueError(f"`--threads` is {self.config.num_threads}, but must be at least 1.")

    def _check_length(self) -> None:
        """Raise if the run would train nothing, or without an end."""
        trainer = self.config.trainer
        is_bounded = trainer.max_steps > 0 or trainer.max_time is not None
        check_epochs(trainer.max_epochs, is_bounded=is_bounded)
        if trainer.max_steps < 1 and trainer.max_steps != -1:
            raise ValueError(
                f"`--trainer.max_steps` is {trainer.max_steps}, but must be at least 1, or -1 for "
                "any number."
            )
        for name in ("limit_train_batches", "check_val_every_n_epoch", "val_check_interval"):
            if trainer[name] == 0:
                raise ValueError(f"`--trainer.{name}` is 0, but must be more.")


def fit_command(
    args: Sequence[str],
    *,
    prepare: Callable[[Sequence[str]], TrainingCLI],
    description: Callable[[TrainingCLI], str],
    score: str,
) -> int:
    """Run the command ``fit`` of a recipe.

    Args:
        args: The arguments, without the name of the command.
        prepare: Prepares a run from the arguments.
        description: Returns the text to print before the run begins.
        score: Format string for the score of the best validation.

    Returns:
        The exit code.
    """
    run = prepare(["--help" if arg == "--help-all" else arg for arg in args])
    run.fit(opening=description(run))
    if run.trainer.is_global_zero:
        if run.best is not None:
            path, value = run.best
            print(f"best checkpoint: {path} ({score.format(value)} in validation)")
        print(f"metrics: {run.out / 'metrics.csv'}")
    return 0
