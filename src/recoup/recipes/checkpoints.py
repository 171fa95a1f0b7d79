"""Checkpoints of recipes: read, checked, and turned into models and the paths of their data."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from recoup.recipes.settings import is_plain
from recoup_cli.mistakes import check_checkpoint

__all__ = ["Checkpoint", "full_path"]

_WRITERS = {"a flow": "recoup flow fit", "a language model": "recoup lm fit"}
_MODEL, _DATA = "hyper_parameters", "datamodule_hyper_parameters"
_MODULE = TypeVar("_MODULE", bound=LightningModule)

# Settings fixed by the state of optimizer, schedule or averages in a checkpoint.
_FIXED = {"averaging", "learning_rate", "num_warmup_steps", "optimizer", "weight_decay"}


class Checkpoint:
    """A checkpoint of a recipe, read to CPU; its settings are plain values.

    Args:
        path: The file.
        option: The option that named it, for messages.

    Attributes:
        contents: The entries of the file.

    Raises:
        ValueError: When there is no such file, or it is not a checkpoint of a recipe.
    """

    def __init__(self, path: str | Path, option: str = "--checkpoint") -> None:
        self.path = path
        self.option = option
        check_checkpoint(path, option)
        try:
            contents: Any = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # Unpickling may raise anything.
            raise ValueError(
                f"`{option}` is {path}, which cannot be read as a checkpoint. It may be another "
                "kind of file, or have been cut short."
            ) from error
        if not isinstance(contents, dict) or not {"state_dict", _MODEL} <= set(contents):
            raise ValueError(
                f"`{option}` is {path}, which is not a checkpoint of a training run. Give a .ckpt "
                "file that `fit` wrote."
            )
        self.contents: dict[str, Any] = contents
        for key in (_MODEL, _DATA):
            settings: Any = contents.get(key, {})
            if not isinstance(settings, dict) or not all(map(_is_plain_setting, settings.items())):
                raise ValueError(
                    f"`{option}` is {path}, whose `{key}` are not plain settings. Give a .ckpt "
                    "file that `fit` wrote."
                )

    @property
    def model_settings(self) -> dict[str, Any]:
        """The settings of the model that was trained."""
        return self._settings(_MODEL)

    @property
    def data_settings(self) -> dict[str, Any]:
        """The settings of its data."""
        return self._settings(_DATA)

    def _settings(self, key: str) -> dict[str, Any]:
        # Lightning's command line adds names of its own, which begin with an underscore.
        found: dict[str, Any] = self.contents.get(key, {})
        return {name: value for name, value in found.items() if not name.startswith("_")}

    def model(self, model_class: type[_MODULE], what: str) -> _MODULE:
        """Return the model with its weights, in evaluation mode on CPU.

        Args:
            model_class: The class of the model.
            what: The kind of the model in messages: "a flow" or "a language model".

        Raises:
            ValueError: When the checkpoint is not one of such a model, or is damaged.
        """
        with self.damage_reported(what):
            model = model_class(**self.model_settings)
            self.check_same_network(model)
            model.load_state_dict(self.contents["state_dict"])
        return model.eval()

    def data_path(self, data_class: type[LightningDataModule]) -> str | None:
        """Return the path of the data that the model was trained on; None for built-in ones.

        The full path, which the checkpoint holds too, replaces one that leads elsewhere from here.

        Raises:
            TypeError: When the checkpoint has something else than a path.
        """
        given: Any = self.data_settings.get("path")
        full: Any = self.contents.get(data_class.__qualname__, {}).get("path")
        if not all(path is None or isinstance(path, str) for path in (given, full)):
            raise TypeError("A path in a checkpoint is not a string.")
        if given is None or full is None or not Path(full).exists():
            return given
        return given if Path(given).resolve() == Path(full) else full

    def is_unseen(self, data: str | None, data_class: type[LightningDataModule], what: str) -> bool:
        """Return whether `data` is given, and another path than that of the training data.

        Args:
            data: The path; None for the training data.
            data_class: The class of the data.
            what: As in `damage_reported`.
        """
        with self.damage_reported(what):
            trained_on = self.data_path(data_class)
        if data is None or trained_on is None:
            return data is not None
        return Path(data).resolve() != Path(trained_on).resolve()

    @contextmanager
    def damage_reported(self, what: str) -> Generator[None]:
        """Turn errors of building a model or its data from the checkpoint into a ValueError.

        Args:
            what: The kind of the model: "a flow" or "a language model".
        """
        try:
            yield
        except (
            TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError,
        ) as error:  # fmt: skip
            raise ValueError(
                f"`{self.option}` is {self.path}, which is not a checkpoint of {what}, or is "
                f"damaged. Give one that `{_WRITERS[what]}` wrote."
            ) from error

    def check_same_network(self, model: LightningModule) -> None:
        """Raise a ValueError that says where the network differs from that of `model`."""
        state = self.contents["state_dict"]
        if not isinstance(state, dict):
            raise ValueError(f"{self.path} is a damaged checkpoint: it has no weights by name.")
        found, needed = (_shapes(each) for each in (state, model.state_dict()))
        if found == needed:
            return
        theirs, ours = self.contents[_MODEL], dict(model.hparams)
        differences = [
            f"{name} {theirs[name]} instead of {ours[name]}"
            for name in ours
            if name in theirs and theirs[name] != ours[name] and name not in ("memory", "seed")
        ]
        raise ValueError(
            f"{self.path} is a checkpoint of another architecture"
            f"{': it has ' + ', '.join(differences) if differences else ''}. Use the settings that "
            "it was trained with, or start a new run."
        )

    def check_resumable(self, model: LightningModule, max_epochs: int | None) -> int:
        """Return the number of epochs that are done, or raise if a run cannot resume from here.

        Args:
            model: The model of the run.
            max_epochs: The number of epochs of the run; None or -1 for no bound.

        Raises:
            ValueError: When the checkpoint was written within an epoch, lacks a state, has all
                epochs of the run behind it, or has the state of other settings.
        """
        progress = self.contents.get("loops", {}).get("fit_loop", {})
        batches = progress.get("epoch_loop.batch_progress")
        if batches is not None and not batches.get("is_last_batch", True):
            raise ValueError(
                f"`--resume` is {self.path}, which was written in the middle of an epoch, where "
                "a run cannot resume bit for bit. Give last.ckpt of the epoch before, or "
                "start from its weights with `--finetune`."
            )
        for part in ("optimizer_states", "lr_schedulers", "loops", "callbacks"):
            if part not in self.contents:
                raise ValueError(
                    f"`--resume` is {self.path}, which has no `{part}` to resume from. Start from "
                    "its weights with `--finetune`."
                )
        num_done = int(self.contents.get("epoch", -1)) + 1
        if max_epochs is not None and 0 <= max_epochs <= num_done:
            raise ValueError(
                f"`--resume` is {self.path}, which has {num_done} epochs behind it, and `--epochs` "
                f"is {max_epochs}. Give more than {num_done}."
            )
        theirs, ours = self.contents[_MODEL], dict(model.hparams)
        for name in sorted(_FIXED & theirs.keys() & ours.keys()):
            if theirs[name] != ours[name]:
                raise ValueError(
                    f"`--model.{name}` is {ours[name]}, but `--resume` continues with "
                    f"{theirs[name]}, whose state is in the checkpoint. Leave it out, or "
                    "start from its weights with `--finetune`."
                )
        return num_done


def full_path(path: str | None) -> str | None:
    """Return a path as a data module stores it in a checkpoint: in full."""
    return None if path is None else str(Path(path).resolve())


def _is_plain_setting(setting: tuple[object, object]) -> bool:
    name, value = setting
    return isinstance(name, str) and is_plain(value)


def _shapes(state: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in state.items()}
