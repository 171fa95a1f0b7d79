"""Preparing a training run of any recipe: Lightning's command line, with short names and resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.mistakes import mistakes_reported
from recoup.recipes.quiet import quiet_lightning
from recoup.recipes.run_folder import check_no_run, checkpoint_folder, free_folder, run_folder
from recoup.recipes.settings import COMMAND, SETTINGS, RunRecord, plain_settings, recorded_folders
from recoup.recipes.training_run import CHECKPOINT, EARLY_STOPPING, TRAINER, TrainingRun
from recoup_cli.fit_arguments import Fit, check_epochs, given_in, long_names

__all__ = ["PreparedRun"]


class PreparedRun(TrainingRun, LightningCLI):
    """A training run, prepared from its command line: model, data and Trainer, all of them checked.

    Nothing is written.

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
            begins; None without one. More attributes are those of `TrainingRun`.

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
        self._num_epochs_before = 0
        self._options_of = {"model": model_class, "data": data_class}
        self._finetuning = finetuning or {}
        self._links = links
        self.monitor = monitor
        with quiet_lightning(), mistakes_reported():
            super().__init__(
                model_class,
                data_class,
                save_config_callback=RunRecord,
                save_config_kwargs={"save_to_log_dir": False},
                trainer_defaults={**TRAINER, **(trainer_defaults or {})},
                seed_everything_default=0,
                parser_kwargs={
                    "prog": f"recoup {recipe} fit",
                    "usage": f"recoup {recipe} fit [options]",
                    "description": (model_class.__doc__ or "").strip().splitlines()[0],
                    "exit_on_error": False,
                    "allow_abbrev": False,
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
    def num_threads(self) -> int | None:
        """Number of threads on CPU; None for that of torch."""
        return self.config.num_threads

    @property
    def saved_to(self) -> Path:
        """The folder of its checkpoints, whether or not the Trainer saves the best."""
        return Path(self.config.checkpoint.dirpath)

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
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        for section, defaults in (("checkpoint", CHECKPOINT), ("early_stopping", EARLY_STOPPING)):
            for name, value in {"monitor": self.monitor, **defaults}.items():
                parser.set_defaults({f"{section}.{name}": value})
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
