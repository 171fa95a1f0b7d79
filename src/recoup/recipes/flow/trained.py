"""A trained flow, and the data it was trained on, from its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.flow.data import Images
from recoup.recipes.flow.model import FlowTraining

__all__ = ["load_data", "load_flow"]


def load_flow(checkpoint: Checkpoint) -> FlowTraining:
    """Return the flow of a checkpoint, ready for evaluation on CPU.

    Raises:
        ValueError: When the file is not a checkpoint of this recipe.
    """
    return checkpoint.model(FlowTraining, "a flow")


def load_data(
    checkpoint: Checkpoint, data: str | None = None, batch_size: int | None = None
) -> Images:
    """Return the data that the flow of a checkpoint was trained on, or other data in the same form.

    Args:
        checkpoint: The checkpoint.
        data: A folder, an .npz or .csv file, or a toy density; None for the training data.
        batch_size: Number of pictures in a batch; None for that of training.

    Raises:
        ValueError: When the data cannot be read, or do not fit the flow.
    """
    with checkpoint.damage_reported("a flow"):
        settings = checkpoint.data_settings
        settings["path"] = checkpoint.data_path(Images) if data is None else data
        if batch_size is not None:
            settings["batch_size"] = batch_size
        images = Images(**settings)
    flow = checkpoint.model_settings
    if images.shape != tuple(flow["shape"]) or images.levels != flow["levels"]:
        raise ValueError(
            f"The data of {images.name} are {_form(images.shape, images.levels)}, but "
            f"{checkpoint.path} is of a flow for {_form(flow['shape'], flow['levels'])}. Give data "
            "in that form."
        )
    if (images.num_classes or 0) > (flow.get("num_classes") or 0):
        raise ValueError(
            f"{images.name} has {images.num_classes} classes, but {checkpoint.path} is of a flow "
            f"for {flow['num_classes']}. Give data with labels below that."
        )
    return images


def _form(shape: Sequence[int], levels: int | None) -> str:
    sizes = " x ".join(map(str, shape))
    return "points in the plane" if levels is None else f"{sizes} with {levels} grey levels"
