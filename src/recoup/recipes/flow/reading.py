"""Reading data from disk into one tensor, with errors that name the file and the reason."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from recoup.recipes.flow.points import TOYS, checked_points, make_points, read_csv

__all__ = ["Samples", "read_samples"]

Array = np.ndarray[Any, np.dtype[Any]]

# Common names of arrays in archives; the first that is present counts.
_TRAIN_KEYS = ("train_images", "x_train", "images", "train_points", "points")
_VALIDATION_KEYS = ("val_images", "x_val", "val_points")
_TEST_KEYS = ("test_images", "x_test", "test_points")
_LABEL_KEYS = {
    "train": ("train_labels", "y_train", "labels"),
    "validation": ("val_labels", "y_val"),
    "test": ("test_labels", "y_test"),
}

_GREY_MODES = {"1", "L", "LA"}
_DEEP_MODES = {"I", "F", "I;16", "I;16B", "I;16L"}


@dataclass(frozen=True, slots=True)
class Samples:
    """Pictures of one shape ``(N, C, H, W)``, uint8 below `levels`, or points ``(N, 2)``.

    `labels` maps the name of a part to its classes ``(N,)``, if the data have any.
    """

    name: str
    levels: int | None
    train: Tensor
    validation: Tensor | None = None
    test: Tensor | None = None
    labels: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def read_samples(source: str | None, size: int | None = None) -> Samples:
    """Read the pictures or points of a source; scikit-learn's digits if `source` is None.

    Args:
        source: A folder of pictures, searched with its subfolders; an ``.npz`` of pictures or
            points; a ``.csv`` of points; or the name of a toy density in the plane, whose points
            are generated.
        size: Side of a square to which each is cropped and resized; None to keep the sizes.

    Raises:
        ValueError: When a file cannot be read or does not fit; the message names it.
    """
    if source is None:
        return _resized(_digits(), size)
    if source in TOYS:
        return _resized(_points(source, *make_points(source)), size)
    path = Path(source)
    if path.is_dir():
        return Samples(str(path), 256, _folder(path, size))
    if path.suffix.lower() == ".npz" and path.is_file():
        return _resized(_archive(path), size)
    if path.suffix.lower() == ".csv" and path.is_file():
        return _resized(_points(source, *read_csv(path)), size)
    what = "is neither a folder nor an .npz or .csv file" if path.exists() else "does not exist"
    raise ValueError(
        f"`--data` is {path}, which {what}. Give a folder of pictures, an .npz or .csv file or one "
        f"of {', '.join(TOYS)}, or leave `--data` out for the built-in digits."
    )


def _points(name: str, points: Tensor, labels: Tensor | None) -> Samples:
    return Samples(name, None, points, labels={} if labels is None else {"train": labels})


def _digits() -> Samples:
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    images = torch.from_numpy(digits.images.astype(np.uint8))[:, None]
    return Samples("the digits", 17, images, labels={"train": torch.from_numpy(digits.target)})


def _folder(path: Path, size: int | None) -> Tensor:
    # Not by torchvision, which must be built for the same torch, as CPU builds of it need not be,
    # nor by `datasets`, which brings pyarrow and pandas; both want a folder for each class.
    endings = {
        ending
        for ending, file_format in Image.registered_extensions().items()
        if file_format in Image.OPEN
    }
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in endings and not file.name.startswith(".")
    )
    if not files:
        raise ValueError(
            f"`--data` is {path}, a folder without pictures. Give one that holds .png, .jpg or "
            "other picture files, in it or in folders below it."
        )
    arrays = [_picture(file, size) for file in files]
    first = arrays[0].shape[:2]
    for file, array in zip(files, arrays, strict=True):
        if array.shape[:2] != first:
            raise ValueError(
                f"{file} is {_sides(array.shape)} pixels, but {files[0]} is {_sides(first)}. "
                f"Make them one size, or use `--data.size {min(*first, *array.shape[:2])}`, which "
                "crops and resizes all."
            )
    num_channels = max(array.shape[2] for array in arrays)  # a single colour picture makes all RGB
    stacked = np.stack([array.repeat(num_channels // array.shape[2], axis=2) for array in arrays])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()


def _picture(file: Path, size: int | None) -> Array:
    """Read one file as ``(H, W, C)``, with C = 1 if it is grey and 3 otherwise."""
    try:
        with Image.open(file) as opened:
            if opened.mode not in _DEEP_MODES:
                image = ImageOps.exif_transpose(opened)
                image = image.convert("L" if image.mode in _GREY_MODES else "RGB")
                image = image if size is None else _square(image, size)
                return np.asarray(image).reshape(image.height, image.width, -1)
    except Exception as error:  # Decoders may raise anything.
        raise ValueError(
            f"{file} cannot be read as a picture ({' '.join(str(error).split())}). "
            "Remove or replace it."
        ) from error
    raise ValueError(f"{file} has more than 8 bits a value. Convert it to 8 bits first.")


def _square(image: Image.Image, size: int) -> Image.Image:
    return ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)


def _archive(path: Path) -> Samples:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays: dict[str, Array] = {key: archive[key] for key in archive.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} cannot be read as an .npz file of plain arrays; it may have been cut short. "
            "Write it with numpy.savez_compressed(path, images=...)."
        ) from error
    levels = int(arrays.pop("levels", np.asarray(256)))
    train = _first(arrays, _TRAIN_KEYS)
    if train is None and len(arrays) == 1:
        train = next(iter(arrays))
    if train is None:
        raise ValueError(
            f"{path} holds {', '.join(arrays) or 'nothing'}, but none of "
            f"{', '.join(_TRAIN_KEYS)}. Name the array of pictures `images`, or of points `points`."
        )
    are_points = arrays[train].ndim == 2
    parts: dict[str, Tensor] = {}
    for part, key in (
        ("train", train),
        ("validation", _first(arrays, _VALIDATION_KEYS)),
        ("test", _first(arrays, _TEST_KEYS)),
    ):
        if key is None:
            continue
        if are_points:
            parts[part] = checked_points(f"`{key}` of {path}", arrays[key])
            continue
        parts[part] = _pictures(path, key, arrays[key], levels)
        if parts[part].shape[1:] != parts["train"].shape[1:]:
            raise ValueError(
                f"`{key}` of {path} has pictures of shape {tuple(parts[part].shape[1:])}, but "
                f"`{train}` of {tuple(parts['train'].shape[1:])}. Make them one shape."
            )
    labels = {
        part: torch.from_numpy(arrays[key])
        for part, keys in _LABEL_KEYS.items()
        if (key := _first(arrays, keys)) is not None and arrays[key].dtype.kind in "iu"
    }
    return Samples(str(path), None if are_points else levels, **parts, labels=labels)


def _first(arrays: dict[str, Array], keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if key in arrays), None)


def _pictures(path: Path, key: str, array: Array, levels: int) -> Tensor:
    """Convert an array to a tensor ``(N, C, H, W)``."""
    if array.dtype != np.uint8:
        raise ValueError(
            f"`{key}` of {path} is of type {array.dtype}, but must be uint8: whole grey levels."
        )
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[3] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if array.ndim != 4 or array.shape[1] not in (1, 3) or not array.size:
        raise ValueError(
            f"`{key}` of {path} has shape {array.shape}, but must be (N, H, W), (N, H, W, C) or "
            "(N, C, H, W) with C 1 or 3; points have shape (N, 2)."
        )
    if array.max() >= levels:
        raise ValueError(
            f"`{key}` of {path} holds {array.max()}, but its `levels` says that values are below "
            f"{levels}."
        )
    return torch.from_numpy(np.ascontiguousarray(array))


def _resized(pictures: Samples, size: int | None) -> Samples:
    if size is None:
        return pictures
    if pictures.levels is None:
        raise ValueError(f"`size` is {size}, but {pictures.name} are points. Leave it out.")
    if pictures.levels != 256:
        raise ValueError(
            f"`size` is {size}, but {pictures.name} has {pictures.levels} grey levels, which "
            "resizing would blur into others. Leave `--data.size` out."
        )
    parts = {
        part: _resized_tensor(images, size)
        for part in ("train", "validation", "test")
        if (images := getattr(pictures, part)) is not None
    }
    return replace(pictures, **parts)


def _resized_tensor(images: Tensor, size: int) -> Tensor:
    rows = [
        np.asarray(_square(Image.fromarray(row.squeeze(2) if row.shape[2] == 1 else row), size))
        for row in images.permute(0, 2, 3, 1).numpy()
    ]
    stacked = np.stack(rows).reshape(len(rows), size, size, images.shape[1])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()


def _sides(shape: tuple[int, ...]) -> str:
    return f"{shape[1]} x {shape[0]}"
