"""Densities in the plane to try flows on: two moons, rings and a checkerboard."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["TOYS", "make_points"]

_NUM_POINTS = 20_000
_SEED = 0  # the points are data, and do not depend on the seed of a run


def make_points(name: str) -> tuple[Tensor, Tensor | None]:
    """Return the points ``(N, 2)`` of a toy density, float32 within about ``[-4, 4]``.

    The second value is the number of the moon or ring of each point, ``(N,)``; None for the
    checkerboard.
    """
    return TOYS[name](_NUM_POINTS, torch.Generator().manual_seed(_SEED))


def _moons(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import make_moons

    points, labels = make_moons(n, noise=0.1, random_state=_SEED)
    centred = (torch.from_numpy(points) - torch.tensor([0.5, 0.25])) * 2
    return centred.float(), torch.from_numpy(labels)


def _rings(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw points of three rings, in numbers proportional to the radius."""
    labels = torch.multinomial(torch.tensor([1.0, 2.0, 3.0]), n, True, generator=generator)
    radius = labels + 1 + 0.1 * torch.randn(n, generator=generator)
    angle = 2 * math.pi * torch.rand(n, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels


def _checkerboard(n: int, generator: torch.Generator) -> tuple[Tensor, None]:
    """Draw points uniformly from the eight dark squares of a 4x4 board."""
    row, column = (
        torch.randint(4, (n,), generator=generator),
        torch.randint(2, (n,), generator=generator),
    )
    corner = torch.stack([2 * column + row % 2, row], dim=1)
    return 2 * (corner + torch.rand(n, 2, generator=generator) - 2), None


TOYS: dict[str, Callable[[int, torch.Generator], tuple[Tensor, Tensor | None]]] = {
    "moons": _moons,
    "rings": _rings,
    "checkerboard": _checkerboard,
}
