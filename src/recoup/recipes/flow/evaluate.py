"""The command ``recoup flow evaluate``: how well a trained flow codes data it has not seen."""

from __future__ import annotations

from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.flow.data import Images
from recoup.recipes.flow.trained import load_data, load_flow
from recoup.recipes.mistakes import mistakes_reported
from recoup.recipes.quiet import evaluated_metrics, quiet_lightning, quiet_trainer
from recoup.recipes.tables import table

__all__ = ["evaluate"]


def evaluate(
    checkpoint: str, data: str | None = None, batch_size: int = 256, accelerator: str = "auto"
) -> int:
    """Print the bits per dimension of test pictures, and their parts; of points also nats a point.

    Without `data`, or with those that the flow was trained on, the pictures are those that
    training kept for the end. Of other data, the test part of an .npz that has one, else all.

    Args:
        checkpoint: The .ckpt file of a trained flow.
        data: A folder of pictures, an .npz or .csv file, moons, rings or checkerboard.
        batch_size: Number of pictures in a batch.
        accelerator: Where to run: auto, cpu or gpu.

    Returns:
        The exit code.
    """
    with mistakes_reported(), quiet_lightning():
        trained = Checkpoint(checkpoint)
        model = load_flow(trained)
        images = load_data(trained, data, batch_size)
        whole = trained.is_unseen(data, Images, "a flow") and not images.has_test_part
        if whole:
            images.test_on_everything()
        num_images = len(images.parts["test"])
        if not num_images:
            raise ValueError(f"{images.name} has no test pictures. Give others with `--data`.")
        trainer = quiet_trainer(accelerator)
    metrics = evaluated_metrics(trainer, model, images)
    which = "all" if whole else "the test part"
    kind = "pictures" if len(images.shape) > 1 else "points"
    print(f"{num_images} {kind}, {which} of {images.name}")
    rows = [
        [name.removeprefix("test_").replace("_per_", "/").replace("_", "-"), f"{value:.4f}"]
        for name, value in sorted(metrics.items())
    ]
    print(table(["bits a value" if kind == "pictures" else "bits or nats", "test"], rows))
    return 0
