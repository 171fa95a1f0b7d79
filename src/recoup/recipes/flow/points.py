"""Points in the plane: those of a file, and densities to try flows on (moons, rings, a board)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["TOYS", "checked_points", "make_points", "read_csv"]

Array = np.ndarray[Any, np.dtype[Any]]

_NUM_POINTS = 20_000
_LEAST_SPREAD = 1e-4  # of a column, relative to its numbers: float32 holds seven digits
_SEED = 0  # the points are data, and do not depend on the seed of a run


def make_points(name: str) -> tuple[Tensor, Tensor | None]:
    """Return the points ``(N, 2)`` of a toy density, float32 within about ``[-4, 4]``.

    The second value is the number of the moon or ring of each point, ``(N,)``; None for the
    checkerboard.
    """
    return TOYS[name](_NUM_POINTS, torch.Generator().manual_seed(_SEED))


def read_csv(path: Path) -> tuple[Tensor, Tensor | None]:
    """Read points ``(N, 2)`` and, from a third column of whole numbers, their labels ``(N,)``.

    A first line without numbers is a header. Lines that begin with # are left out.

    Raises:
        ValueError: When the file holds something else; the message says where.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy warns of a file without rows
            rows: Array = np.loadtxt(
                path, delimiter=",", ndmin=2, skiprows=_num_header_lines(path), encoding="utf-8-sig"
            )
    except (ValueError, UserWarning) as error:
        raise ValueError(
            f"{path} cannot be read as numbers with commas ({' '.join(str(error).split())}). Write "
            "a line of two numbers for each point."
        ) from error
    if rows.shape[1] not in (2, 3):
        raise ValueError(
            f"{path} has {rows.shape[1]} columns, but must have two, which are points in the "
            "plane, or a third with their labels. recoup.flows.RealNVP takes points of any size."
        )
    points = checked_points(str(path), rows[:, :2])
    if rows.shape[1] == 2:
        return points, None
    labels = torch.from_numpy(rows[:, 2])
    if not bool((labels == labels.round()).all()):
        wrong = float(labels[labels != labels.round()][0])
        raise ValueError(
            f"The third column of {path} holds {wrong}, but labels are whole numbers. Leave the "
            "column out if it is none."
        )
    return points, labels.long()


def checked_points(name: str, array: Array) -> Tensor:
    """Return points as a tensor ``(N, 2)``, float32.

    Args:
        name: Where they are from, for messages.
        array: Numbers of shape ``(N, 2)``.

    Raises:
        ValueError: When they are of another shape, not finite, or lie on a line along an axis.
    """
    if array.ndim != 2 or array.shape[1] != 2 or not len(array) or array.dtype.kind not in "fiu":
        raise ValueError(
            f"{name} has shape {array.shape} and type {array.dtype}, but points in the plane are "
            "numbers of shape (N, 2)."
        )
    points = torch.from_numpy(array.astype(np.float64))
    if not bool(points.isfinite().all()):
        row = int((~points.isfinite()).any(1).nonzero()[0])
        raise ValueError(
            f"{name} holds {points[row].tolist()} as point {row + 1}, but a density is of finite "
            "numbers. Leave such points out."
        )
    for column in range(2):
        values = points[:, column]
        if float(values.std(correction=0)) <= _LEAST_SPREAD * float(values.abs().max()):
            raise ValueError(
                f"Column {column + 1} of {name} is {float(values.mean()):g} but for a spread of "
                f"{float(values.std(correction=0)):.2g}, which leaves no density in float32. "
                "Subtract its mean, or drop it if it is constant."
            )
    return points.float()


def _num_header_lines(path: Path) -> int:
    """Return the number of lines up to the header; 0 if the first line with content has numbers."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            text = line.partition("#")[0].strip()
            if text:
                return 0 if any(map(_is_number, text.split(","))) else number
    return 0


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


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
