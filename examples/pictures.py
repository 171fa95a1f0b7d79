"""Pictures of what a flow has learned: grids of samples, and the density of points in the plane."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from recoup.flows import Flow

__all__ = ["density_picture", "grid", "rows_with_titles"]

_GAP, _SIDE_PIXELS, _DOTS = 6, 64, 100
_INK, _QUIET = "#222222", "#666666"
_NUM_CELLS, _MOST_POINTS = 400, 8000  # along the longer side of a density; points beside it


def grid(images: Tensor, levels: int, num_columns: int | None = None) -> Image.Image:
    """Put pictures ``(N, C, H, W)`` of grey levels side by side, in a square if None."""
    num_images, num_channels = images.shape[:2]
    num_columns = num_columns or math.ceil(math.sqrt(num_images))
    num_rows = math.ceil(num_images / num_columns)
    scale = max(1, round(_SIDE_PIXELS / max(images.shape[2:])))
    pixels = (images.double() * (255 / (levels - 1))).round().clamp(0, 255).to(torch.uint8)
    large = pixels.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    missing = num_rows * num_columns - num_images
    tiles = pad(large, (0, _GAP, 0, _GAP, 0, 0, 0, missing), value=255)
    rows = tiles.unflatten(0, (num_rows, num_columns)).permute(0, 3, 1, 4, 2)
    array = pad(rows.flatten(2, 3).flatten(0, 1), (0, 0, _GAP, 0, _GAP, 0), value=255).numpy()
    return Image.fromarray(array[:, :, 0] if num_channels == 1 else array)


def rows_with_titles(rows: Sequence[tuple[str, Image.Image]], title: str) -> Image.Image:
    """Stack grids, each beneath its title, beneath a title of the whole."""
    width = max(image.width for _, image in rows) / _DOTS + 0.6
    head, line = 0.62, 0.34
    height = head + sum(image.height / _DOTS + line for _, image in rows) + 0.2
    figure = Figure((width, height), _DOTS, facecolor="white")
    left, top = 0.3 / width, height - head
    figure.text(left, 1 - 0.36 / height, title, fontsize=14, fontweight="bold", color=_INK)
    for name, image in rows:
        figure.text(left, (top - line + 0.08) / height, name, fontsize=11, color=_INK)
        top -= line + image.height / _DOTS
        x, y = round(0.3 * _DOTS), round(top * _DOTS)
        figure.figimage(np.asarray(image.convert("RGB")), xo=x, yo=y, origin="upper")
    return _drawn(figure)


@torch.no_grad()
def density_picture(flow: Flow, points: Tensor, shares: Tensor | None = None) -> Image.Image:
    """Draw points ``(N, 2)``, and beside them the density that a flow gives to the same square.

    Args:
        flow: A flow of points, in evaluation mode.
        points: The points that it was trained on.
        shares: The probabilities of the classes, for a conditional flow.
    """
    points = points.cpu()
    low, high = points.double().amin(0), points.double().amax(0)
    margin = 0.06 * float((high - low).max())
    low, high = low - margin, high + margin
    cell = float((high - low).max()) / _NUM_CELLS
    x, y = (
        torch.arange(float(a) + cell / 2, float(b), cell) for a, b in zip(low, high, strict=True)
    )
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    where = torch.stack([columns.flatten(), rows.flatten()], dim=1)
    density = torch.cat([_density(flow, each, shares) for each in where.split(10_000)])
    density = density.view(len(y), len(x)).double().cpu().numpy()
    mass = float(density.sum()) * cell**2

    figure = Figure((9.75, 4.5 * len(y) / len(x) + 0.6), _DOTS, facecolor="white")
    figure.set_layout_engine("constrained", h_pad=0.12, w_pad=0.12)
    left, right = figure.subplots(1, 2)
    shown = points[:: max(1, len(points) // _MOST_POINTS)].numpy()
    left.scatter(shown[:, 0], shown[:, 1], s=2.2, c="#fcb216", alpha=0.6, linewidths=0)
    left.set_facecolor("#000004")  # with which the colour map begins
    extent = (float(low[0]), float(high[0]), float(low[1]), float(high[1]))
    # Without this bound a few sharp peaks would leave the rest dark.
    top = float(np.quantile(density, 0.998)) or 1.0
    right.imshow(density, origin="lower", extent=extent, cmap="inferno", vmin=0, vmax=top)
    texts = (f"{len(points):,} points", f"density of the flow, {mass:.3f} of it shown")
    for axes, text in zip((left, right), texts, strict=True):
        axes.set(xlim=extent[:2], ylim=extent[2:], xticks=[], yticks=[], aspect="equal")
        axes.set_title(text, fontsize=10.5, color=_QUIET, loc="left")
    return _drawn(figure)


def _density(flow: Flow, points: Tensor, shares: Tensor | None) -> Tensor:
    parameter = next(flow.parameters())
    points = points.to(parameter)
    if shares is None:
        return flow.log_prob(points).exp()
    return torch.stack(
        [
            share * flow.log_prob(points, parameter.new_full((len(points),), label).long()).exp()
            for label, share in enumerate(shares.tolist())
        ]
    ).sum(0)


def _drawn(figure: Figure) -> Image.Image:
    canvas: Any = FigureCanvasAgg(figure)  # instead of pyplot: no window, no global state
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
