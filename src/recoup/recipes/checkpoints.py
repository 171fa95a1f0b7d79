"""Reading a checkpoint, and checking whether it fits a model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from recoup.recipes.plain_settings import is_plain
from recoup_cli.mistakes import check_checkpoint

__all__ = [
    "check_same_network",
    "damage_reported",
    "data_path_in",
    "noted_path",
    "read_checkpoint",
    "settings_in",
]

_WRITERS = {"a flow": "recoup flow fit", "a language model": "recoup lm fit"}
_SETTINGS = ("hyper_parameters", "datamodule_hyper_parameters")


def read_checkpoint(path: str | Path, option: str) -> dict[str, Any]:
    """Read a checkpoint of a recipe, to CPU.

    Args:
        path: The file.
        option: The option that named it, for the message.

    Raises:
        ValueError: When there is no such file, or it is not a checkpoint.
    """
    check_checkpoint(path, option)
    try:
        checkpoint: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # Unpickling may raise anything.
        raise ValueError(
            f"`{option}` is {path}, which cannot be read as a checkpoint. It may be another kind "
            "of file, or have been cut short."
        ) from error
    if not isinstance(checkpoint, dict) or not {"state_dict", "hyper_parameters"} <= set(
        checkpoint
    ):
        raise ValueError(
            f"`{option}` is {path}, which is not a checkpoint of a training run. Give a .ckpt file "
            "that `fit` wrote."
        )
    for key in _SETTINGS:
        settings: Any = checkpoint.get(key, {})
        if not isinstance(settings, dict) or not all(map(_is_plain_setting, settings.items())):
            raise ValueError(
                f"`{option}` is {path}, whose `{key}` are not plain settings. Give a .ckpt file "
                "that `fit` wrote."
            )
    return checkpoint


def _is_plain_setting(setting: tuple[object, object]) -> bool:
    name, value = setting
    return isinstance(name, str) and is_plain(value)


def settings_in(checkpoint: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the settings that a checkpoint was written with.

    Args:
        checkpoint: The checkpoint.
        key: "hyper_parameters" for those of the model, "datamodule_hyper_parameters" for the data.
    """
    # Lightning's command line adds names of its own, which begin with an underscore.
    found: dict[str, Any] = checkpoint.get(key, {})
    return {name: value for name, value in found.items() if not name.startswith("_")}


@contextmanager
def damage_reported(path: str | Path, what: str) -> Generator[None]:
    """Turn errors of building a model or its data from a checkpoint into a ValueError.

    Args:
        path: The checkpoint.
        what: The kind of the model: "a flow" or "a language model".
    """
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"`--checkpoint` is {path}, which is not a checkpoint of {what}, or is damaged. Give "
            f"one that `{_WRITERS[what]}` wrote."
        ) from error


def data_path_in(checkpoint: dict[str, Any], key: str) -> str | None:
    """Return the path of the data that a checkpoint was trained on; None for built-in ones.

    The full path, which the checkpoint holds too, replaces one that leads elsewhere from here.

    Args:
        checkpoint: The checkpoint.
        key: The key of the data module's state.
    """
    given: Any = settings_in(checkpoint, "datamodule_hyper_parameters").get("path")
    noted: Any = checkpoint.get(key, {}).get("path")
    if not all(path is None or isinstance(path, str) for path in (given, noted)):
        raise TypeError("A path in a checkpoint is not a string.")
    if given is None or noted is None or not Path(noted).exists():
        return given
    return given if Path(given).resolve() == Path(noted) else noted


def noted_path(path: str | None) -> str | None:
    """Return a path as a data module stores it in a checkpoint: in full."""
    return None if path is None else str(Path(path).resolve())


def check_same_network(checkpoint: dict[str, Any], model: LightningModule, path: str) -> None:
    """Raise a ValueError that says where the network of a checkpoint differs from `model`'s."""
    state = checkpoint["state_dict"]
    if not isinstance(state, dict):
        raise ValueError(f"{path} is a damaged checkpoint: it has no weights by name.")
    found, wanted = (_shapes(each) for each in (state, model.state_dict()))
    if found == wanted:
        return
    theirs, ours = checkpoint["hyper_parameters"], dict(model.hparams)
    differences = [
        f"{name} {theirs[name]} instead of {ours[name]}"
        for name in ours
        if name in theirs and theirs[name] != ours[name] and name not in ("memory", "seed")
    ]
    raise ValueError(
        f"{path} is a checkpoint of another architecture"
        f"{': it has ' + ', '.join(differences) if differences else ''}. Use the settings that it "
        "was trained with, or start a new run."
    )


def _shapes(state: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in state.items()}
