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
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from recoup.recipes.checkpoints import check_same_network, read_checkpoint
from recoup.recipes.mistakes import mistakes_reported, one_line
from recoup.recipes.plain_settings import folders_noted, plain_settings
from recoup.recipes.progress import MetricsFile, Progress
from recoup.recipes.quiet import quiet_lightning
from recoup.recipes.run_folder import WholeCheckpoints, folder_locked
from recoup.recipes.run_record import COMMAND, CONFIG_FILE, SETTINGS, RunRecord
from recoup.recipes.stopping import Stopping, StopRun
from recoup_cli import MistakeError
from recoup_cli.fit_arguments import SHORT_NAMES, Fit, check_epochs, given_in, long_names
from recoup_cli.mistakes import StoppedError

__all__ = ["SHORT_NAMES", "TrainingCLI", "fit_command", "free_folder"]

# Settings fixed by the state of optimizer, schedule or averages in a checkpoint.
_KEPT = {"averaging", "learning_rate", "num_warmup_steps", "optimizer", "weight_decay"}


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
        self.resume: str | None = None
        self.finetune: str | None = None
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
            begun_from = self.begun_from
            if begun_from is not None:
                option, path = begun_from
                checkpoint = read_checkpoint(path, option)
                check_same_network(checkpoint, self.model, path)
                if option == "--resume":
                    self._check_epochs(checkpoint)
                    self._check_kept(checkpoint)
                else:
                    self.model.load_state_dict(checkpoint["state_dict"])
            if begun_from is None or begun_from[0] != "--resume":
                self._check_out()

    @property
    def begun_from(self) -> tuple[str, str] | None:
        """The option that names a checkpoint to begin with, and its path; None without one."""
        if self.resume is not None:
            return "--resume", self.resume
        return None if self.finetune is None else ("--finetune", self.finetune)

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
        return _shown(Path(callback.best_model_path)), float(callback.best_model_score)

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
                        self._check_out()  # Another run may have written to it in between.
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
            return f"stopped after epoch {num_epochs}, the last one: {_shown(self._last(last))}"
        return f"stopped after epoch {num_epochs}; {self._go_on(last)}"

    def _go_on(self, last: WholeEpochs) -> str:
        if not last.num_epochs and self.resume is None:
            return "No epoch had ended. Begin again."
        path = shlex.quote(str(_shown(self._last(last))))
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
        self._take(parser.parse_args(args))
        if self.resume is not None and self.finetune is not None:
            raise ValueError("`--resume` and `--finetune` are both given. Give one of them.")
        if self.begun_from is None:
            return
        option, path = self.begun_from
        checkpoint = read_checkpoint(path, option)
        theirs = checkpoint.get(COMMAND, parser.prog)
        if theirs != parser.prog:
            raise ValueError(
                f"`{option}` is {path}, which `{theirs}` wrote. Give one that `{parser.prog}` did."
            )
        noted = checkpoint.get(SETTINGS)
        if noted is not None:
            settings = plain_settings(
                noted,
                owners=self._options_of,
                source=f"`{option}` is {path}, which",
                is_given=lambda setting: given_in(args, setting),
            )
            if self.resume is None:
                settings.setdefault("model", {}).update(self._finetuning)
            else:
                self._stay_in_place(settings, noted, args)
            self._take(parser.parse_args(["--config", yaml.safe_dump(settings), *args]))

    def _stay_in_place(self, settings: Any, noted: Any, args: Sequence[str]) -> None:
        """Resume in the folder in which the checkpoint lies now."""
        checkpoint = Path(self.resume or "")
        saved_apart = folders_noted(noted)
        if saved_apart is None or saved_apart[1] == _saved_to(str(saved_apart[0])):
            settings.setdefault("trainer", {})["default_root_dir"] = str(_folder_of(checkpoint))
        elif given_in(args, "trainer.default_root_dir"):
            settings.setdefault("checkpoint", {})["dirpath"] = str(checkpoint.parent)
        else:
            raise ValueError(
                f"`--resume` is {checkpoint}, of a run that did not save in its own folder, which a"
                " checkpoint does not choose. Give that folder by `--out`."
            )

    def _take(self, config: Any) -> None:
        self.config: Any = config
        self.resume = config.pop("resume")
        self.finetune = config.pop("finetune")

    def before_instantiate_classes(self) -> None:
        """Choose the folders of the run, and check its length and threads."""
        trainer = self.config.trainer
        if trainer.default_root_dir is None:
            trainer.default_root_dir = str(free_folder(Path("runs", self.recipe), "fit"))
        if self.config.checkpoint.dirpath is None:
            self.config.checkpoint.dirpath = str(_saved_to(trainer.default_root_dir))

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

    def _check_out(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"`--out` is {self.out}, which is a file. Give a folder.")
        last = self.out / "checkpoints" / "last.ckpt"
        if last.exists() or (self.out / CONFIG_FILE).exists():
            go_on = f"Go on with it by `--resume {last}`, or give" if last.exists() else "Give"
            raise ValueError(
                f"`--out` is {self.out}, which holds a run already. {go_on} another folder."
            )

    def _check_kept(self, checkpoint: dict[str, Any]) -> None:
        theirs, ours = checkpoint["hyper_parameters"], dict(self.model.hparams)
        for name in sorted(_KEPT & theirs.keys() & ours.keys()):
            if theirs[name] != ours[name]:
                raise ValueError(
                    f"`--model.{name}` is {ours[name]}, but `--resume` goes on with "
                    f"{theirs[name]}, of which the state is in the checkpoint. Leave it out, or "
                    "begin with the weights by `--finetune`."
                )

    def _check_epochs(self, checkpoint: dict[str, Any]) -> None:
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
        if progress is not None and not progress.get("is_last_batch", True):
            raise ValueError(
                f"`--resume` is {self.resume}, which was written in the middle of an epoch, where "
                "a run cannot be gone on with bit for bit. Give last.ckpt of the epoch before, or "
                "begin with its weights by `--finetune`."
            )
        for part in ("optimizer_states", "lr_schedulers", "loops", "callbacks"):
            if part not in checkpoint:
                raise ValueError(
                    f"`--resume` is {self.resume}, which has no `{part}` to go on with. Begin with "
                    "its weights by `--finetune`."
                )
        done, most = int(checkpoint.get("epoch", -1)) + 1, self.trainer.max_epochs
        self._num_epochs_before = done
        if most is not None and 0 <= most <= done:
            raise ValueError(
                f"`--resume` is {self.resume}, which has {done} epochs behind it, and `--epochs` "
                f"is {most}. Give more than {done}."
            )


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


class WholeEpochs(ModelCheckpoint):
    """A callback that saves at the end of each epoch that was not cut short.

    A run cannot resume from an epoch that was, and its checkpoint would replace one that can.

    Attributes:
        num_epochs: Number of epochs before the last checkpoint; 0 before the first.
    """

    num_epochs = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, if the run trained on the whole epoch."""
        is_whole = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if is_whole or not self.best_model_path:  # A run shorter than an epoch gets one too.
            super().on_train_epoch_end(trainer, pl_module)
        if is_whole and Path(self.best_model_path).is_file():
            self.num_epochs = trainer.current_epoch + 1


def free_folder(parent: Path, name: str) -> Path:
    """Return the first of ``name-1``, ``name-2``, ... in `parent` that does not exist."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def _shown(path: Path) -> Path:
    """Return a path relative to the working directory, if it lies there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _saved_to(folder: str) -> Path:
    """Return the folder to which a run saves checkpoints by default."""
    return Path(folder, "checkpoints")


def _folder_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint is part of."""
    folder = checkpoint.parent
    return folder.parent if folder.name == "checkpoints" else folder
