"""Pictures of what a flow has learned: grids of samples, and the density of points in the plane."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from recoup.flows import Flow

_GAP, _SIDE_PIXELS, _DOTS = 6, 64, 100
_NUM_CELLS, _MOST_POINTS = 400, 8000  # along the longer side of a density; points beside it


def grid(images: Tensor, levels: int, num_columns: int | None = None) -> Image.Image:
    """Put pictures ``(N, C, H, W)`` of grey levels side by side, in a square if None."""
    num_columns = num_columns or math.ceil(math.sqrt(len(images)))
    num_rows = math.ceil(len(images) / num_columns)
    scale = max(1, round(_SIDE_PIXELS / max(images.shape[2:])))
    pixels = (images.double() * (255 / (levels - 1))).round().clamp(0, 255).to(torch.uint8)
    large = pixels.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    missing = num_rows * num_columns - len(images)
    tiles = pad(large, (0, _GAP, 0, _GAP, 0, 0, 0, missing), value=255)
    rows = tiles.unflatten(0, (num_rows, num_columns)).permute(0, 3, 1, 4, 2)
    array = pad(rows.flatten(2, 3).flatten(0, 1), (0, 0, _GAP, 0, _GAP, 0), value=255).numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


@torch.no_grad()
def density_picture(flow: Flow, points: Tensor, labels: Tensor | None = None) -> Image.Image:
    """Draw points ``(N, 2)``, and beside them the density that a flow gives to the same square.

    With their classes ``(N,)``, for a conditional flow, it is the density of all together.
    """
    low, high = points.double().amin(0).cpu(), points.double().amax(0).cpu()
    margin = 0.06 * float((high - low).max())
    low, high = low - margin, high + margin
    cell = float((high - low).max()) / _NUM_CELLS
    x, y = (
        torch.arange(float(a) + cell / 2, float(b), cell) for a, b in zip(low, high, strict=True)
    )
    where = torch.cartesian_prod(y, x).flip(1).to(points)
    density = torch.cat([_density(flow, each, labels) for each in where.split(10_000)])
    density = density.view(len(y), len(x)).double().cpu().numpy()

    figure = Figure((9.75, 4.5 * len(y) / len(x) + 0.6), _DOTS, layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = points[:: max(1, len(points) // _MOST_POINTS)].cpu().numpy()
    left.scatter(shown[:, 0], shown[:, 1], s=2.2, c="#fcb216", alpha=0.6, linewidths=0)
    left.set_facecolor("#000004")  # with which the colour map begins
    extent = (float(low[0]), float(high[0]), float(low[1]), float(high[1]))
    # Without this bound a few sharp peaks would leave the rest dark.
    top = float(np.quantile(density, 0.998)) or 1.0
    right.imshow(density, origin="lower", extent=extent, cmap="inferno", vmin=0, vmax=top)
    mass = float(density.sum()) * cell**2
    titles = (f"{len(points):,} points", f"density of the flow, {mass:.3f} of it shown")
    for axes, title in zip((left, right), titles, strict=True):
        axes.set(xlim=extent[:2], ylim=extent[2:], xticks=[], yticks=[], aspect="equal")
        axes.set_title(title, color="#666666", loc="left")
    canvas: Any = FigureCanvasAgg(figure)  # instead of pyplot: no window, no global state
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _density(flow: Flow, points: Tensor, labels: Tensor | None) -> Tensor:
    if labels is None:
        return flow.log_prob(points).exp()
    shares = labels.bincount() / len(labels)
    each = [
        share * flow.log_prob(points, labels.new_full((len(points),), label)).exp()
        for label, share in enumerate(shares)
    ]
    return torch.stack(each).sum(0)
