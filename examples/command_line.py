"""What both examples add to Lightning's command line: seeds, checkpoints, and one rule about them.

A checkpoint may come from anywhere, so it brings tensors and numbers, and chooses nothing: no code
(it is read with ``weights_only=True``), no settings and no paths. Settings come from the command
line and from files given to it, such as ``config.yaml`` in the folder of a run; these choose
classes, as code does, so read those that others wrote.
"""

from __future__ import annotations

import hashlib
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI


def seed_at(*key: str | int) -> int:
    """Return the seed of a step, for a key such as ``(seed, "train", epoch, batch)``.

    A resumed run draws what the uninterrupted one would have drawn, and every memory mode the same.
    It is a digest, since sums of small numbers would give several keys the same seed.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def check_checkpoint(path: str, is_resumed: bool = False) -> None:
    """Raise a ValueError unless a file holds plain values, undamaged, after a whole epoch."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch does not compare the checksums
        if damaged is not None:
            raise ValueError(f"its part {damaged} is damaged")
        contents: Any = torch.load(path, map_location="cpu", weights_only=True)
        progress = contents["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        is_whole = progress["is_last_batch"]
    except Exception as error:  # unpickling may raise anything
        raise ValueError(
            f"`--ckpt_path` is {path}, which cannot be read as a checkpoint of tensors and numbers "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}). Give best.ckpt or "
            "last.ckpt of a run."
        ) from error
    if is_resumed and not is_whole:
        raise ValueError(
            f"`--ckpt_path` is {path}, which was written within an epoch, where no run can resume "
            "bit for bit. Give last.ckpt of an epoch that ended."
        )


class TrainingCLI(LightningCLI):
    """Lightning's command line: ``fit``, ``validate``, ``test`` and ``predict``, and a run of each.

    A run has a folder, ``runs/<name>/version_0`` or the next number, with ``config.yaml``,
    ``metrics.csv`` and the checkpoints of the best and of the last epoch.

    Args:
        model_class: The module to train.
        data_class: Its data.
        name: The folder of its runs, in ``runs``.
        monitor: The metric of the validation whose lowest value marks the best checkpoint.
        of_data: Attributes of the data, and the argument of the model that each of them is.
        trainer_defaults: Settings of the Trainer that are not Lightning's.
        options: Whether to `run` a command, and its `args`, as for Lightning's.
    """

    def __init__(
        self,
        model_class: type[LightningModule],
        data_class: type[LightningDataModule],
        *,
        name: str,
        monitor: str,
        of_data: Mapping[str, str],
        trainer_defaults: dict[str, Any],
        **options: Any,
    ) -> None:
        self.monitor, self.of_data = monitor, of_data
        warnings.filterwarnings("ignore", ".*does not have many workers")  # data are in memory
        warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec")  # of lightning 2.6
        warnings.filterwarnings("ignore", ".*WeightAveraging state cannot be restored")  # in a test
        logger = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": name}}
        last = ModelCheckpoint(
            filename="last", save_on_train_epoch_end=True, enable_version_counter=False
        )
        defaults = {"max_epochs": 30, "logger": logger, "log_every_n_steps": 1}
        defaults |= {"num_sanity_val_steps": 0, "enable_model_summary": False}
        defaults |= {"callbacks": [last], **trainer_defaults}
        super().__init__(
            model_class,
            data_class,
            trainer_defaults=defaults,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            **options,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add threads, the best checkpoint, early stopping, and what the model has of the data."""
        threads = "Threads on CPU. One is fastest for small networks, or on a shared machine."
        parser.add_argument("--num_threads", type=int | None, default=None, help=threads)
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        parser.set_defaults(
            {
                "checkpoint.monitor": self.monitor,
                "checkpoint.filename": "best",
                "checkpoint.enable_version_counter": False,
                "early_stopping.monitor": self.monitor,
                "early_stopping.patience": 20,
                "early_stopping.strict": False,  # a run may be too short to validate
            }
        )
        parser.link_arguments("seed_everything", "data.seed")
        parser.link_arguments("seed_everything", "model.seed")
        for attribute, argument in self.of_data.items():
            parser.link_arguments(f"data.{attribute}", f"model.{argument}", apply_on="instantiate")

    def _parse_ckpt_path(self) -> None:
        """Take no settings from a checkpoint, as Lightning does: see the head of this file."""

    def before_instantiate_classes(self) -> None:
        """Check the checkpoint, and set the number of threads."""
        config = self.config if self.subcommand is None else self.config[self.subcommand]
        if config.get("ckpt_path") is not None:
            check_checkpoint(config.ckpt_path, is_resumed=self.subcommand == "fit")
            config.weights_only = True
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)

    def before_fit(self) -> None:
        """Let checkpoints be written whole, and name no files."""
        self.trainer.strategy.checkpoint_io = _Checkpoints()


class _Checkpoints(TorchCheckpointIO):
    """A checkpoint replaces the one before when all of it is on the disk.

    Those that are read lose the paths in them: Lightning would remove the files that a checkpoint
    names as those it replaces.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        whole, part = Path(path), Path(f"{path}.part")
        whole.parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, part)
        part.replace(whole)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        contents = super().load_checkpoint(*args, **kwargs)
        states = contents["callbacks"].items()
        contents["callbacks"] = {k: state for k, state in states if "ModelCheckpoint" not in str(k)}
        return contents
