"""Composite pictures: grids of samples, and reconstructions beneath their originals."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from recoup.memory.whole_files import write_whole

__all__ = ["check_picture", "grid", "rows_with_titles", "save"]

_WHITE, _GAP = 255, 6  # level and pixels between the pictures
_SIDE_PIXELS = 64  # a picture is enlarged to about this many
_INK = "#222222"


def check_picture(path: Path) -> Path:
    """Return `path`, or raise a ValueError if no picture can be written there."""
    endings = Image.registered_extensions()
    if endings.get(path.suffix.lower()) not in Image.SAVE:
        raise ValueError(
            f"`--out` is {path}, but no picture can be written with that ending. Try "
            f"{path.with_suffix('.png').name}."
        )
    if path.is_dir():
        raise ValueError(f"`--out` is {path}, which is a folder. Give a file in it.")
    if path.parent.exists() and not path.parent.is_dir():
        raise ValueError(f"`--out` is {path}, but {path.parent} is a file. Give another folder.")
    return path


def grid(images: Tensor, levels: int, num_columns: int | None = None) -> Image.Image:
    """Put pictures ``(N, C, H, W)`` of levels side by side, enlarged without smoothing.

    Args:
        images: Values 0 to ``levels - 1``.
        levels: Number of grey levels.
        num_columns: Number of pictures in a row; None for a square.

    Returns:
        The grid, with a small gap between the pictures.
    """
    num_images, num_channels = images.shape[:2]
    num_columns = math.ceil(math.sqrt(num_images)) if num_columns is None else num_columns
    num_rows = math.ceil(num_images / num_columns)
    scale = max(1, round(_SIDE_PIXELS / max(images.shape[2:])))
    pixels = (images.double() * (255 / (levels - 1))).round().clamp(0, 255).to(torch.uint8)
    large = pixels.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    num_missing = num_rows * num_columns - num_images
    tiles = pad(large, (0, _GAP, 0, _GAP, 0, 0, 0, num_missing), value=_WHITE)
    rows = tiles.unflatten(0, (num_rows, num_columns)).permute(0, 3, 1, 4, 2)
    canvas = rows.flatten(2, 3).flatten(0, 1)  # (height, width, channels)
    array = pad(canvas, (0, 0, _GAP, 0, _GAP, 0), value=_WHITE).numpy()
    return Image.fromarray(array[:, :, 0] if num_channels == 1 else array)


def rows_with_titles(
    rows: Sequence[tuple[str, Image.Image]], title: str, note: str = ""
) -> Image.Image:
    """Stack grids, each with its title, beneath a title of the whole."""
    # Objects instead of pyplot: no window and no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dots = 100
    width = max(image.width for _, image in rows) / dots + 0.6
    head, line = 0.62 + 0.26 * bool(note), 0.34
    height = head + sum(image.height / dots + line for _, image in rows) + 0.2
    figure = Figure((width, height), dots, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    left = 0.3 / width
    figure.text(left, 1 - 0.36 / height, title, fontsize=14, fontweight="bold", color=_INK)
    if note:
        figure.text(left, 1 - 0.64 / height, note, fontsize=10.5, color="#666666")
    top = height - head
    for name, image in rows:
        figure.text(left, (top - line + 0.08) / height, name, fontsize=11, color=_INK)
        top -= line + image.height / dots
        figure.figimage(
            np.asarray(image.convert("RGB")),
            xo=round(0.3 * dots),
            yo=round(top * dots),
            origin="upper",
        )
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def save(image: Image.Image, path: Path) -> Path:
    """Write a picture, whole or not at all; return its path."""
    content = io.BytesIO()
    image.save(content, format=Image.registered_extensions()[path.suffix.lower()])
    write_whole(path, content.getvalue())
    return path
