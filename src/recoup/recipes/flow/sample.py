"""The command ``recoup flow sample``: pictures, or the density of points, of a trained flow."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from recoup.flows import Flow
from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.checks import check_at_least, move_to_device
from recoup.recipes.draws import generator_for
from recoup.recipes.flow.density import density_picture
from recoup.recipes.flow.pictures import check_picture, grid, save
from recoup.recipes.flow.trained import load_data, load_flow
from recoup.recipes.mistakes import mistakes_reported

__all__ = ["sample"]

_NUM, _TEMPERATURE = 64, 0.7


def sample(
    checkpoint: str,
    num: int | None = None,
    temperature: float | None = None,
    out: str = "samples.png",
    seed: int = 0,
    device: str = "cpu",
    labels: str | None = None,
) -> int:
    """Draw pictures from a trained flow, and write them into one file as a grid.

    Of a flow over the plane its density is drawn, beside the points that it was trained on.

    Args:
        checkpoint: The .ckpt file of a trained flow.
        num: Number of pictures; 64 if left out.
        temperature: Spread of the latents, 1 for that of training; less gives likelier pictures;
            0.7 if left out.
        out: The file to write: .png, or another that Pillow writes.
        seed: Seed of the latents.
        device: Where to run: cpu or cuda.
        labels: Classes to draw, such as 3 or 0,1,7, for a conditional flow; a row for each class
            if left out.

    Returns:
        The exit code.
    """
    with mistakes_reported():
        path = check_picture(Path(out))
        check_at_least(1, **{"--num": num})
        if temperature is not None and not temperature >= 0:
            raise ValueError(f"`--temperature` is {temperature}, but must be at least 0.")
        trained = Checkpoint(checkpoint)
        flow = load_flow(trained).flow
        classes = _classes(labels, flow.num_classes)
        move_to_device(flow, device)
        generator = generator_for(seed)
        if len(flow.shape) == 1:
            for name, value in (("num", num), ("temperature", temperature)):
                if value is not None:
                    raise ValueError(
                        f"`--{name}` is {value}, but this flow is of points, whose density "
                        "is drawn. Leave it out."
                    )
            picture, line = _density(trained, flow, classes)
            save(picture, path)
            print(f"{line}: {path}")
            return 0
    temperature = _TEMPERATURE if temperature is None else temperature
    picture, count = _pictures(flow, num or _NUM, temperature, classes, generator)
    save(picture, path)
    print(f"{count} samples at temperature {temperature:g}: {path}")
    return 0


def _pictures(
    flow: Flow, num: int, temperature: float, classes: list[int], generator: torch.Generator
) -> tuple[Image.Image, int]:
    """Draw samples: in a square, or in a row for each class."""
    columns, labels = None, None
    if classes:
        columns = max(1, num // len(classes))
        labels = torch.tensor(classes).repeat_interleave(columns)
        num = len(labels)
    images = flow.sample(num, labels=labels, temperature=temperature, generator=generator)
    return grid(images.cpu(), flow.levels or 256, columns), num


def _density(checkpoint: Checkpoint, flow: Flow, classes: list[int]) -> tuple[Image.Image, str]:
    """Draw the density of the chosen classes, weighted by their frequencies in the data."""
    data = load_data(checkpoint)
    points, weights = data.parts["train"], None
    title = f"What a flow learned of the {data.name}"
    if classes:
        labels = data.labels["train"]
        kept = torch.isin(labels, torch.tensor(classes))
        points = points[kept]
        counts = torch.bincount(labels[kept], minlength=flow.num_classes or 0)
        weights = counts / counts.sum()
        if len(classes) < (flow.num_classes or 0):
            title += f": class {', '.join(map(str, classes))}"
    picture, mass = density_picture(flow, points, title, weights)
    return picture, f"density of {data.name}, {mass:.3f} of it within the picture"


def _classes(labels: str | None, num_classes: int | None) -> list[int]:
    """Return the classes that `labels` names; all classes if it is None."""
    if num_classes is None:
        if labels is not None:
            raise ValueError(
                f"`--labels` is {labels}, but this flow is not conditional. Leave it out, or train "
                "one with `--model.conditional true`."
            )
        return []
    if labels is None:
        return list(range(num_classes))
    names = [name.strip() for name in str(labels).split(",")]
    if not all(name.isdecimal() and int(name) < num_classes for name in names):
        raise ValueError(
            f"`--labels` is {labels}, but must be classes from 0 to {num_classes - 1}, such as 0 "
            "or 0,1."
        )
    return [int(name) for name in names]
