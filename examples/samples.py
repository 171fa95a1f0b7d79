"""Reading what a flow is trained on: pictures, or points in the plane, as tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_digits, make_moons
from torch import Tensor

__all__ = ["TOYS", "Samples", "read_samples"]

TOYS = ("moons", "rings", "checkerboard")
_NUM_POINTS = 20_000

# Common names of arrays in archives; the first that is present counts.
_KEYS = {
    "train": ("train_images", "x_train", "images", "train_points", "points"),
    "validation": ("val_images", "x_val", "val_points"),
    "test": ("test_images", "x_test", "test_points"),
}
_LABEL_KEYS = {
    "train": ("train_labels", "y_train", "labels"),
    "validation": ("val_labels", "y_val"),
    "test": ("test_labels", "y_test"),
}


@dataclass(frozen=True)
class Samples:
    """Pictures ``(N, C, H, W)`` of whole grey levels, or points ``(N, 2)``.

    Attributes:
        name: What they are called in messages.
        levels: Number of grey levels; None for points.
        parts: Samples of "train", and of "validation" and "test" if the data name them.
        labels: Classes ``(N,)`` of the samples of a part, if the data have any.
    """

    name: str
    levels: int | None
    parts: dict[str, Tensor]
    labels: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def read_samples(source: str | None, size: int | None = None) -> Samples:
    """Read pictures or points.

    Args:
        source: A folder of pictures, searched with its subfolders; an ``.npz`` of pictures (uint8)
            or points; a ``.csv`` of points, perhaps with a third column of labels; moons, rings or
            checkerboard; scikit-learn's digits if None.
        size: Side of a square to which the pictures of a folder are cropped and resized.

    Raises:
        ValueError: When a file cannot be read, or does not fit; the message names it.
    """
    if source is None:
        digits: Any = load_digits()
        images = torch.from_numpy(digits.images.astype(np.uint8))[:, None]
        return Samples("the digits", 17, {"train": images}, {"train": torch.tensor(digits.target)})
    path = Path(source)
    if source in TOYS:
        return _points(source, *_toy(source))
    if path.is_dir():
        return Samples(source, 256, {"train": _folder(path, size)})
    if path.suffix == ".npz" and path.is_file():
        return _archive(path)
    if path.suffix == ".csv" and path.is_file():
        return _csv(path)
    raise ValueError(
        f"`path` is {path}, which is no folder, .npz or .csv file. Give one of these, one of "
        f"{', '.join(TOYS)}, or nothing for scikit-learn's digits."
    )


def _toy(name: str) -> tuple[Tensor, Tensor | None]:
    """Draw points of a density in the plane, within about ``[-4, 4]``, and their classes."""
    draw = torch.Generator().manual_seed(0)  # data, which do not depend on the seed of a run
    n = _NUM_POINTS
    if name == "moons":
        points, labels = make_moons(n, noise=0.1, random_state=0)
        return 2 * (torch.from_numpy(points) - torch.tensor([0.5, 0.25])), torch.tensor(labels)
    if name == "rings":  # three, in numbers proportional to the radius
        labels = torch.multinomial(torch.tensor([1.0, 2.0, 3.0]), n, True, generator=draw)
        radius = labels + 1 + 0.1 * torch.randn(n, generator=draw)
        angle = 2 * math.pi * torch.rand(n, generator=draw)
        return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels
    row = torch.randint(4, (n,), generator=draw)
    column = torch.randint(2, (n,), generator=draw)
    corner = torch.stack([2 * column + row % 2, row], dim=1)
    return 2 * (corner + torch.rand(n, 2, generator=draw) - 2), None


def _points(name: str, points: Tensor, labels: Tensor | None) -> Samples:
    if points.ndim != 2 or points.shape[1] != 2 or not points.isfinite().all():
        raise ValueError(
            f"{name} has shape {tuple(points.shape)}, but points in the plane are finite numbers "
            "of shape (N, 2)."
        )
    given = {} if labels is None else {"train": labels.long()}
    return Samples(name, None, {"train": points.float()}, given)


def _csv(path: Path) -> Samples:
    try:
        rows = np.loadtxt(path, delimiter=",", ndmin=2, encoding="utf-8-sig")
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read as numbers with commas ({error}). Write a line of two numbers "
            "for each point, without a header."
        ) from error
    table = torch.from_numpy(rows)
    if table.shape[1] == 3 and not (table[:, 2] == table[:, 2].round()).all():
        raise ValueError(f"The third column of {path} must hold whole numbers, which are labels.")
    has_labels = table.shape[1] == 3
    return _points(
        str(path), table[:, :2] if has_labels else table, table[:, 2] if has_labels else None
    )


def _archive(path: Path) -> Samples:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except Exception as error:  # of a broken archive anything
        raise ValueError(
            f"{path} cannot be read as an .npz of plain arrays; it may have been cut short. Write "
            "it with numpy.savez_compressed(path, images=...)."
        ) from error
    levels = int(arrays.pop("levels", np.asarray(256)))
    names = {
        part: next((key for key in keys if key in arrays), None) for part, keys in _KEYS.items()
    }
    if names["train"] is None:
        raise ValueError(
            f"{path} holds {', '.join(arrays) or 'nothing'}. Name the array of pictures `images`, "
            "or of points `points`."
        )
    parts = {part: arrays[key] for part, key in names.items() if key is not None}
    labels = {
        part: torch.from_numpy(arrays[key]).long()
        for part, keys in _LABEL_KEYS.items()
        if (key := next((key for key in keys if key in arrays), None)) is not None
    }
    if parts["train"].ndim == 2:
        points = {
            part: _points(f"`{names[part]}` of {path}", torch.from_numpy(array), None).parts[
                "train"
            ]
            for part, array in parts.items()
        }
        return Samples(str(path), None, points, labels)
    images = {part: _pictures(f"`{names[part]}` of {path}", each) for part, each in parts.items()}
    for part, each in images.items():
        if each.shape[1:] != images["train"].shape[1:] or int(each.max()) >= levels:
            raise ValueError(
                f"`{names[part]}` of {path} has shape {tuple(each.shape)} and values up to "
                f"{int(each.max())}, but pictures must have one shape, and values below {levels}."
            )
    return Samples(str(path), levels, images, labels)


def _pictures(name: str, array: Any) -> Tensor:
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[3] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if array.ndim != 4 or array.shape[1] not in (1, 3) or not array.size or array.dtype != np.uint8:
        raise ValueError(
            f"{name} has shape {array.shape} and type {array.dtype}, but pictures are uint8 of "
            "shape (N, H, W), (N, H, W, C) or (N, C, H, W) with C 1 or 3."
        )
    return torch.from_numpy(np.ascontiguousarray(array))


def _folder(path: Path, size: int | None) -> Tensor:
    endings = {each for each, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in endings)
    if not files:
        raise ValueError(f"`path` is {path}, a folder without pictures. Give another.")
    arrays = [_picture(file, size) for file in files]
    for file, array in zip(files, arrays, strict=True):
        if array.shape[:2] != arrays[0].shape[:2]:
            raise ValueError(
                f"{file} has another size than {files[0]}. Make them one size, or give "
                "`--data.size`, which crops and resizes all."
            )
    num_channels = max(array.shape[2] for array in arrays)  # one colour picture makes all RGB
    images = np.stack([array.repeat(num_channels // array.shape[2], axis=2) for array in arrays])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def _picture(file: Path, size: int | None) -> Any:
    """Read a picture as ``(H, W, C)``, with C = 1 if it is grey and 3 otherwise."""
    try:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode in ("I", "F", "I;16", "I;16B", "I;16L"):
                raise ValueError("it has more than 8 bits a value")
            image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
            if size is not None:
                image = ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)
            return np.asarray(image).reshape(image.height, image.width, -1)
    except Exception as error:  # decoders may raise anything
        raise ValueError(f"{file} cannot be read as a picture: {error}. Remove it.") from error
