"""The command ``fit`` of every recipe: Lightning's command line, with short names and resume."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from recoup.recipes.checkpoints import check_same_network, read_checkpoint
from recoup.recipes.mistakes import mistakes_reported
from recoup.recipes.plain_settings import folders_noted, plain_settings
from recoup.recipes.progress import MetricsFile, Progress
from recoup.recipes.quiet import quiet_lightning
from recoup.recipes.run_record import COMMAND, CONFIG_FILE, SETTINGS, RunRecord

__all__ = ["SHORT_NAMES", "TrainingCLI", "fit_command", "free_folder"]

# Spellings that are translated before anything is parsed: each setting has one name in
# configuration files, and the full names of Lightning's command line all work.
SHORT_NAMES = {
    "--data": "--data.path",
    "--memory": "--model.memory",
    "--epochs": "--trainer.max_epochs",
    "--batch-size": "--data.batch_size",
    "--out": "--trainer.default_root_dir",
    "--seed": "--seed_everything",
    "--threads": "--num_threads",
}


# What the state of the optimizer, of its schedule or of the averages in a checkpoint decides.
_KEPT = {"averaging", "learning_rate", "num_warmup_steps", "optimizer", "weight_decay"}
_OWN_SETTINGS = {"--config", "--resume", "--finetune"}


class TrainingCLI(LightningCLI):
    """Prepares a training run from its command line; `fit` runs it.

    Nothing is written before `fit`: arguments, data, network and checkpoint are checked first.

    Args:
        model_class: The Lightning module of the recipe.
        data_class: Its data module.
        recipe: Name of the recipe, for messages and for where runs go: ``runs/<recipe>/fit-1``.
        configs: Folder of the configuration files that come with the recipe; ``--config`` finds
            them by their bare names.
        links: Pairs of names: a property of the data, and the setting of the model that it gives.
        monitor: The metric whose lowest value marks the best checkpoint.
        args: The arguments, without the name of the command.
        default_config: The configuration that counts if the arguments name none.
        short_names: Short names of settings.
        trainer_defaults: Settings of the Trainer that are not Lightning's.
        finetuning: Settings of the model that ``--finetune`` changes.

    Raises:
        MistakeError: When something is wrong that the user can mend.
    """

    def __init__(
        self,
        model_class: type[LightningModule],
        data_class: type[LightningDataModule],
        *,
        recipe: str,
        configs: Path,
        links: Sequence[tuple[str, str]],
        monitor: str,
        args: Sequence[str],
        default_config: str | None = None,
        short_names: Mapping[str, str] = SHORT_NAMES,
        trainer_defaults: Mapping[str, Any] | None = None,
        finetuning: Mapping[str, Any] | None = None,
    ) -> None:
        self.recipe = recipe
        self.resume: str | None = None
        self.finetune: str | None = None
        self._options_of = {"model": model_class, "data": data_class}
        self._configs = configs
        self._default_config = default_config
        self._short_names = short_names
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
                args=self._long_names(args),
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
        """The option that named a checkpoint to begin with, and its path; None without one."""
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
        path = Path(callback.best_model_path)
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        return path, float(callback.best_model_score)

    def fit(self, *callbacks: Callback, progress: Progress | None = None) -> None:
        """Train; what the run leaves behind is in `out`.

        Args:
            callbacks: Callbacks for this run beside those of the configuration.
            progress: What shows how far it is; a bar and a line an epoch if None.
        """
        trainer: Any = self.trainer
        # Its own, since `save_last` of the other writes only when there is a new best.
        last = _WholeEpochs(
            self.config.checkpoint.dirpath,
            filename="last",
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        shown = progress or Progress(self._monitor)
        trainer.callbacks += [MetricsFile(), shown, *callbacks, last]
        with self.threads(), quiet_lightning():
            trainer.fit(
                self.model, self.datamodule, ckpt_path=self.resume, weights_only=bool(self.resume)
            )

    @contextmanager
    def threads(self) -> Generator[None]:
        """Have as many threads as the run asks for."""
        num_threads = torch.get_num_threads()
        try:
            torch.set_num_threads(self.config.num_threads or num_threads)
            yield
        finally:
            torch.set_num_threads(num_threads)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what Lightning's command line does not have."""
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
                "early_stopping.strict": False,  # A run may be too short for a validation.
            }
        )
        parser.link_arguments("seed_everything", "data.seed")
        parser.link_arguments("seed_everything", "model.seed")
        for source, target in self._links:
            parser.link_arguments(source, target, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; beginning with the settings of the checkpoint that the run begins with."""
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
                is_given=lambda setting: _is_given(args, setting),
            )
            if self.resume is None:
                settings.setdefault("model", {}).update(self._finetuning)
            else:
                self._stay_in_place(settings, noted, args)
            self._take(parser.parse_args(["--config", yaml.safe_dump(settings), *args]))

    def _stay_in_place(self, settings: Any, noted: Any, args: Sequence[str]) -> None:
        """Go on in the folder of the checkpoint, wherever it lies now."""
        checkpoint = Path(self.resume or "")
        saved_apart = folders_noted(noted)
        if saved_apart is None or saved_apart[1] == _saved_to(str(saved_apart[0])):
            settings.setdefault("trainer", {})["default_root_dir"] = str(_folder_of(checkpoint))
        elif _is_given(args, "trainer.default_root_dir"):
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
        """Decide where the run goes."""
        trainer = self.config.trainer
        if trainer.default_root_dir is None:
            trainer.default_root_dir = str(free_folder(Path("runs", self.recipe), "fit"))
        if self.config.checkpoint.dirpath is None:
            self.config.checkpoint.dirpath = str(_saved_to(trainer.default_root_dir))

        if self.config.num_threads is not None and self.config.num_threads < 1:
            raise ValueError(f"`--threads` is {self.config.num_threads}, but must be at least 1.")

    def _long_names(self, args: Sequence[str]) -> list[str]:
        """Write short names out, and find configurations that come with the recipe."""
        long: list[str] = []
        for arg in args:
            name, equals, value = arg.partition("=")
            name = self._short_names.get(name, name)
            long += [name, value] if equals else [name]
        if self._default_config is not None and not _OWN_SETTINGS & set(long):
            long = ["--config", self._default_config, *long]
        for index in range(1, len(long)):
            shipped = self._configs / f"{long[index]}.yaml"
            if (
                long[index - 1] == "--config"
                and not Path(long[index]).exists()
                and shipped.is_file()
            ):
                long[index] = str(shipped)
        return long

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
        done, most = int(checkpoint.get("epoch", -1)) + 1, self.trainer.max_epochs
        if most is not None and 0 <= most <= done:
            raise ValueError(
                f"`--resume` is {self.resume}, which has {done} epochs behind it, and `--epochs` "
                f"is {most}. Give more than {done}."
            )


def fit_command(
    args: Sequence[str],
    *,
    usage: str,
    prepare: Callable[[Sequence[str]], TrainingCLI],
    description: Callable[[TrainingCLI], str],
    score: str,
) -> int:
    """Run the command ``fit`` of a recipe.

    Args:
        args: The arguments, without the name of the command.
        usage: What ``--help`` prints.
        prepare: From the arguments to what is to be trained.
        description: What is said of it before it begins.
        score: How the best validation is said, a format of one number.

    Returns:
        The exit code.
    """
    if "--help" in args or "-h" in args:
        print(usage)
        return 0
    run = prepare(["--help" if arg == "--help-all" else arg for arg in args])
    if run.trainer.is_global_zero:
        print(description(run))
    run.fit()
    if run.trainer.is_global_zero:
        if run.best is not None:
            path, value = run.best
            print(f"best checkpoint: {path} ({score.format(value)} in validation)")
        print(f"metrics: {run.out / 'metrics.csv'}")
    return 0


class _WholeEpochs(ModelCheckpoint):
    """Saves at the end of each epoch, but not of one that was cut short.

    Such a one cannot be gone on with, and its checkpoint would replace one that can.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, if all of the epoch was trained on."""
        is_whole = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if is_whole or not self.best_model_path:  # Of a run shorter than that there is one, too.
            super().on_train_epoch_end(trainer, pl_module)


def free_folder(parent: Path, name: str) -> Path:
    """Return the first of ``name-1``, ``name-2``, ... in `parent` that is not there."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def _saved_to(folder: str) -> Path:
    """Where a run saves checkpoints, if it is not told."""
    return Path(folder, "checkpoints")


def _is_given(args: Sequence[str], setting: str) -> bool:
    """Say whether arguments give a setting, or a part of it."""
    names = [arg.partition("=")[0].rstrip("+") for arg in args]
    return any(name == f"--{setting}" or name.startswith(f"--{setting}.") for name in names)


def _folder_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint is part of."""
    folder = checkpoint.parent
    return folder.parent if folder.name == "checkpoints" else folder
