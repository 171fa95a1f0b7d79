"""Reading what a flow is trained on: pictures, or points in the plane, as tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_digits, make_moons
from torch import Tensor

TOYS = ("moons", "rings", "checkerboard")
_NUM_POINTS = 20_000


class Samples(NamedTuple):
    """Pictures ``(N, C, H, W)`` of whole grey levels, or points ``(N, 2)``.

    Attributes:
        levels: Number of grey levels; None for points.
        parts: Samples of "train", and of "validation" and "test" if the data name them.
        labels: Classes ``(N,)`` of the samples of a part, if the data have any.
    """

    levels: int | None
    parts: dict[str, Tensor]
    labels: dict[str, Tensor]


def read_samples(source: str | None, size: int | None = None) -> Samples:
    """Read pictures or points.

    Args:
        source: A folder of pictures, searched with its subfolders; an ``.npz`` of pictures (uint8)
            or points; moons, rings or checkerboard; scikit-learn's digits if None.
        size: Side of a square to which the pictures of a folder are cropped and resized.

    Raises:
        ValueError: When a file cannot be read, or does not fit; the message names it.
    """
    if source is None:
        digits: Any = load_digits()
        images = torch.from_numpy(digits.images.astype(np.uint8))[:, None]
        return Samples(17, {"train": images}, {"train": torch.tensor(digits.target)})
    path = Path(source)
    if source in TOYS:
        points, labels = _toy(source)
        return Samples(None, {"train": points}, {} if labels is None else {"train": labels})
    if path.is_dir():
        return Samples(256, {"train": _folder(path, size)}, {})
    if path.suffix == ".npz" and path.is_file():
        return _archive(path)
    raise ValueError(
        f"`path` is {path}, which is no folder and no .npz file. Give one of these, one of "
        f"{', '.join(TOYS)}, or nothing for scikit-learn's digits."
    )


def _toy(name: str) -> tuple[Tensor, Tensor | None]:
    """Draw points of a density in the plane, within about ``[-4, 4]``, and their classes."""
    draw = torch.Generator().manual_seed(0)  # data, which do not depend on the seed of a run
    n = _NUM_POINTS
    if name == "moons":
        points, labels = make_moons(n, noise=0.1, random_state=0)
        moons = 2 * (torch.from_numpy(points) - torch.tensor([0.5, 0.25]))
        return moons.float(), torch.tensor(labels)
    if name == "rings":  # three, in numbers proportional to the radius
        labels = torch.multinomial(torch.tensor([1.0, 2.0, 3.0]), n, True, generator=draw)
        radius = labels + 1 + 0.1 * torch.randn(n, generator=draw)
        angle = 2 * math.pi * torch.rand(n, generator=draw)
        return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels
    row = torch.randint(4, (n,), generator=draw)
    column = torch.randint(2, (n,), generator=draw)
    corner = torch.stack([2 * column + row % 2, row], dim=1)
    return 2 * (corner + torch.rand(n, 2, generator=draw) - 2), None


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
    names = _names(arrays, "{}_images", "x_{}", "{}_points", "images", "points")
    if "train" not in names:
        raise ValueError(
            f"{path} holds {', '.join(arrays) or 'nothing'}. Name the array of pictures `images`, "
            "or of points `points`."
        )
    names_of_labels = _names(arrays, "{}_labels", "y_{}", "labels")
    labels = {part: torch.tensor(arrays[name]).long() for part, name in names_of_labels.items()}
    are_points = arrays[names["train"]].ndim == 2
    read = _points if are_points else _pictures
    parts = {part: read(f"`{name}` of {path}", arrays[name]) for part, name in names.items()}
    for part, samples in parts.items():
        is_too_large = not are_points and int(samples.max()) >= levels
        if is_too_large or samples.shape[1:] != parts["train"].shape[1:]:
            raise ValueError(
                f"`{names[part]}` of {path} has shape {tuple(samples.shape)} and values up to "
                f"{samples.max()}, but all parts must have one shape, and values below {levels}."
            )
    return Samples(None if are_points else levels, parts, labels)


def _names(arrays: dict[str, Any], *patterns: str) -> dict[str, str]:
    """Return the name of the array of each part, the first of the patterns that is there."""
    names: dict[str, str] = {}
    for part, short in {"train": "train", "validation": "val", "test": "test"}.items():
        for name in (pattern.format(short) for pattern in patterns):
            if name in arrays and name not in names.values():
                names.setdefault(part, name)
    return names


def _points(name: str, array: Any) -> Tensor:
    if array.ndim != 2 or array.shape[1] != 2 or not np.isfinite(array).all():
        raise ValueError(
            f"{name} has shape {array.shape}, but points in the plane are finite numbers of shape "
            "(N, 2)."
        )
    return torch.from_numpy(array).float()


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
    pictures = [_picture(file, size) for file in files]
    for file, picture in zip(files, pictures, strict=True):
        if picture.size != pictures[0].size:
            raise ValueError(
                f"{file} has another size than {files[0]}. Make them one size, or give "
                "`--data.size`, which crops and resizes all."
            )
    mode = "RGB" if any(picture.mode == "RGB" for picture in pictures) else "L"
    images = np.stack([np.atleast_3d(np.asarray(picture.convert(mode))) for picture in pictures])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def _picture(file: Path, size: int | None) -> Image.Image:
    """Read a picture, grey or in colour, upright."""
    try:
        with Image.open(file) as opened:
            if opened.mode in ("I", "F", "I;16", "I;16B", "I;16L"):
                raise ValueError("it has more than 8 bits a value")
            upright = ImageOps.exif_transpose(opened)
            image = upright.convert("L" if upright.mode in ("1", "L", "LA") else "RGB")
            return ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS) if size else image
    except Exception as error:  # decoders may raise anything
        raise ValueError(f"{file} cannot be read as a picture: {error}. Remove it.") from error
