"""Draw from a trained flow: ``recoup flow sample``."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from recoup.flows import Flow
from recoup.recipes.devices import moved
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
        if num is not None and num < 1:
            raise ValueError(f"`--num` is {num}, but must be at least 1.")
        if temperature is not None and not temperature >= 0:
            raise ValueError(f"`--temperature` is {temperature}, but must be at least 0.")
        flow = load_flow(checkpoint).flow
        classes = _classes(labels, flow.num_classes)
        moved(flow, device)
        generator = generator_for(seed)
        if len(flow.shape) == 1:
            for name, value in (("num", num), ("temperature", temperature)):
                if value is not None:
                    raise ValueError(
                        f"`--{name}` is {value}, but this flow is of points, of which the density "
                        "is drawn. Leave it out."
                    )
            picture, line = _density(checkpoint, flow, classes)
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


def _density(checkpoint: str, flow: Flow, classes: list[int]) -> tuple[Image.Image, str]:
    """Draw the density of the chosen classes, weighted by their frequencies in the data."""
    data = load_data(checkpoint)
    points, weights = data.parts["train"], None
    title = f"What a flow learned of the {data.name}"
    if classes:
        labels = data.labels["train"]
        kept = torch.isin(labels, torch.tensor(classes))
        points = points[kept]
        weights = _frequencies(labels[kept], flow.num_classes or 0)
        if len(classes) < (flow.num_classes or 0):
            title += f": class {', '.join(map(str, classes))}"
    picture, mass = density_picture(flow, points, title, weights)
    return picture, f"density of {data.name}, {mass:.3f} of it within the picture"


def _frequencies(labels: Tensor, num_classes: int) -> Tensor:
    return torch.bincount(labels, minlength=num_classes) / len(labels)


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
