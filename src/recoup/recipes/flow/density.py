"""The picture of a density in the plane, beside its training points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recoup.flows import Flow

__all__ = ["density_picture", "log_density"]

_MOST_CELLS = 400  # of the grid, along the longer side
_MOST_POINTS = 8000
_PANEL, _GAP, _HEAD, _FOOT = 4.5, 0.25, 0.85, 0.25  # inches
_INK, _QUIET, _NIGHT = "#222222", "#666666", "#000004"  # the last begins the colour map


@dataclass(frozen=True, slots=True)
class _View:
    """The part of the plane that is drawn, and a grid of square cells over it."""

    low: tuple[float, float]
    num_cells: tuple[int, int]
    cell: float

    @staticmethod
    def around(points: Tensor) -> _View:
        low, high = points.double().amin(0), points.double().amax(0)
        sides = high - low
        margin = 0.06 * float(sides.max())
        cell = (float(sides.max()) + 2 * margin) / _MOST_CELLS
        columns, rows = ((sides + 2 * margin) / cell).round().int().tolist()
        return _View((float(low[0]) - margin, float(low[1]) - margin), (columns, rows), cell)

    @property
    def extent(self) -> tuple[float, float, float, float]:
        (left, bottom), (columns, rows) = self.low, self.num_cells
        return left, left + columns * self.cell, bottom, bottom + rows * self.cell

    def cells(self) -> Tensor:
        """Return the middles of the cells ``(rows * columns, 2)``, row by row."""
        x, y = (
            start + (torch.arange(count, dtype=torch.float64) + 0.5) * self.cell
            for start, count in zip(self.low, self.num_cells, strict=True)
        )
        rows, columns = torch.meshgrid(y, x, indexing="ij")
        return torch.stack([columns.flatten(), rows.flatten()], dim=1)


@torch.no_grad()
def log_density(flow: Flow, points: Tensor, weights: Tensor | None) -> Tensor:
    """Return the log-density ``(N,)`` of points, in nats, a batch at a time.

    Args:
        flow: The flow.
        points: Shape ``(N, 2)``.
        weights: The probabilities of the classes ``(num_classes,)``, for a conditional flow.
    """
    like = flow.base.like

    def of(batch: Tensor) -> Tensor:
        batch = batch.to(like)
        if weights is None:
            return flow.log_prob(batch)
        # Classes of probability 0 add nothing, and are not evaluated.
        each = [
            flow.log_prob(batch, torch.full((len(batch),), label, device=like.device))
            + float(weights[label].log())
            for label in weights.nonzero().flatten().tolist()
        ]
        return torch.stack(each).logsumexp(0)

    return torch.cat([of(batch) for batch in points.split(10_000)])


def density_picture(
    flow: Flow, points: Tensor, title: str, weights: Tensor | None = None
) -> tuple[Image.Image, float]:
    """Draw points, and beside them the density that a flow gives to the same square.

    Args:
        flow: A flow over the plane, in evaluation mode.
        points: The points on which it was trained, ``(N, 2)``.
        title: The title of the picture.
        weights: The probabilities of the classes, for a conditional flow.

    Returns:
        The picture, and the mass of the density within it: below 1 if some lies outside.
    """
    # Objects instead of pyplot: no window and no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    view = _View.around(points)
    columns, rows = view.num_cells
    density = log_density(flow, view.cells(), weights).exp().double().cpu().view(rows, columns)
    mass = float(density.sum()) * view.cell**2
    tall = _PANEL * rows / columns
    width, height = 2 * _PANEL + 3 * _GAP, tall + _HEAD + _FOOT
    figure = Figure((width, height), 100, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    left, right = (
        figure.add_axes(
            (start / width, _FOOT / height, _PANEL / width, tall / height), facecolor=_NIGHT
        )
        for start in (_GAP, 2 * _GAP + _PANEL)
    )
    shown = points[:_MOST_POINTS].numpy()
    left.scatter(shown[:, 0], shown[:, 1], s=2.2, c="#fcb216", alpha=0.6, linewidths=0)
    # Without this bound a few sharp peaks would leave the rest dark.
    top = float(np.quantile(density.numpy(), 0.998))
    right.imshow(
        density.numpy(),
        origin="lower",
        extent=view.extent,
        cmap="inferno",
        vmin=0,
        vmax=top or 1.0,
        interpolation="bilinear",
    )
    some = f"{len(shown):,} of " if len(shown) < len(points) else ""
    for axes, name in ((left, f"{some}{len(points):,} points"), (right, "density of the flow")):
        _frame(axes, view, name)
    figure.text(_GAP / width, 1 - 0.4 / height, title, fontsize=14, fontweight="bold", color=_INK)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"), mass


def _frame(axes: Any, view: _View, name: str) -> None:
    left, right, bottom, top = view.extent
    axes.set(xlim=(left, right), ylim=(bottom, top), xticks=[], yticks=[], aspect="equal")
    axes.set_title(name, fontsize=10.5, color=_QUIET, loc="left", pad=5)
    for spine in axes.spines.values():
        spine.set_visible(False)
