"""A trained flow, and the data it was trained on, from its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recoup.recipes.checkpoints import (
    check_same_network,
    damage_reported,
    data_path_in,
    read_checkpoint,
    settings_in,
)
from recoup.recipes.flow.data import Images
from recoup.recipes.flow.model import FlowTraining

__all__ = ["load_data", "load_flow", "load_path"]


def load_flow(path: str | Path) -> FlowTraining:
    """Return the flow of a checkpoint, ready for evaluation on CPU.

    Raises:
        ValueError: When the file is not a checkpoint of this recipe.
    """
    checkpoint = read_checkpoint(path, "--checkpoint")
    with damage_reported(path, "a flow"):
        model = FlowTraining(**settings_in(checkpoint, "hyper_parameters"))
        check_same_network(checkpoint, model, str(path))
        model.load_state_dict(checkpoint["state_dict"])
    return model.eval()


def load_data(path: str | Path, data: str | None = None, batch_size: int | None = None) -> Images:
    """Return the data that the flow of a checkpoint was trained on, or other data in the same form.

    Args:
        path: The checkpoint.
        data: A folder, an .npz file or a toy density; None for the training data.
        batch_size: Number of pictures in a batch; None for that of training.

    Raises:
        ValueError: When the data cannot be read, or do not fit the flow.
    """
    checkpoint = read_checkpoint(path, "--checkpoint")
    with damage_reported(path, "a flow"):
        settings = settings_in(checkpoint, "datamodule_hyper_parameters")
        settings["path"] = data_path_in(checkpoint, Images.__qualname__) if data is None else data
        if batch_size is not None:
            settings["batch_size"] = batch_size
        images = Images(**settings)
    flow = settings_in(checkpoint, "hyper_parameters")
    if images.shape != tuple(flow["shape"]) or images.levels != flow["levels"]:
        raise ValueError(
            f"The data of {images.name} are {_form(images.shape, images.levels)}, but {path} is "
            f"of a flow for {_form(flow['shape'], flow['levels'])}. Give data in that form."
        )
    if (images.num_classes or 0) > (flow.get("num_classes") or 0):
        raise ValueError(
            f"{images.name} has {images.num_classes} classes, but {path} is of a flow for "
            f"{flow['num_classes']}. Give data with labels below that."
        )
    return images


def _form(shape: Sequence[int], levels: int | None) -> str:
    sizes = " x ".join(map(str, shape))
    return "points in the plane" if levels is None else f"{sizes} with {levels} grey levels"


def load_path(path: str | Path) -> str | None:
    """Return the path of the data on which the flow of a checkpoint was trained."""
    with damage_reported(path, "a flow"):
        return data_path_in(read_checkpoint(path, "--checkpoint"), Images.__qualname__)
