"""Pictures to train on: scikit-learn's digits, a folder, or an ``.npz``; split and put in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from recoup.recipes.checkpoints import noted_path
from recoup.recipes.flow.reading import Pictures, read_pictures

__all__ = ["Images"]

# The split does not follow the seed of a run: runs with different seeds are compared on the same
# pictures, and a checkpoint is evaluated on what its training has not seen.
_SPLIT_SEED = 0


class Images(LightningDataModule):
    """Pictures in training, validation and test parts, as batches ``(N, C, H, W)`` of grey levels.

    All pictures are held in memory, a byte a value. Which picture belongs to which part depends
    on the data alone; the order of epoch e depends on `seed` and e alone, so that a run that was
    interrupted goes on as if it had not been.

    Args:
        path: A folder of pictures (searched with its subfolders), or an .npz file with uint8
            arrays; scikit-learn's handwritten digits if None.
        levels: Number of grey levels to train on; those of the data if None.
        batch_size: Number of pictures in a batch.
        validation_fraction: Part of the pictures that validates each epoch.
        test_fraction: Part of the pictures kept for the end, if the data have no test part.
        size: Side of a square to which all pictures are cropped and resized; None to take them
            as they are.
        num_workers: Number of processes that put batches together.
        seed: Seed of the order of the training pictures.
    """

    def __init__(
        self,
        path: str | None = None,
        levels: int | None = None,
        batch_size: int = 64,
        validation_fraction: float = 0.1,
        test_fraction: float = 0.1,
        size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        _check(levels, batch_size, validation_fraction, test_fraction, size)
        self.path = path
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        pictures = read_pictures(None if path is None else Path(path), size)
        self.name = pictures.name
        self.levels = pictures.levels if levels is None else levels
        self.has_test_part = pictures.test is not None
        self.parts = {
            part: _reduced(images, pictures.levels, self.levels)
            for part, images in _split(pictures, validation_fraction, test_fraction).items()
        }

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape ``(C, H, W)`` of one picture."""
        num_channels, height, width = self.parts["train"].shape[1:]
        return num_channels, height, width

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Batches of the training part, in an order that `seed` and the epoch decide."""
        dataset = _Rows(self.parts["train"])
        # Its order is a function of the seed and the epoch, which the Trainer tells it.
        sampler = DistributedSampler(
            dataset,
            num_replicas=1 if self.trainer is None else self.trainer.world_size,
            rank=0 if self.trainer is None else self.trainer.global_rank,
            seed=self.seed,
        )
        return self._loader(dataset, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Batches of the validation part."""
        return self._loader(_Rows(self.parts["validation"]))

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Batches of the test part."""
        return self._loader(_Rows(self.parts["test"]))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must have of the pictures: where they were."""
        return {"path": noted_path(self.path)}

    def test_on_everything(self) -> None:
        """Let the test part be all pictures, for data of which training has seen none."""
        self.parts["test"] = torch.cat(list(self.parts.values()))

    def _loader(self, dataset: _Rows, **options: Any) -> DataLoader[Tensor]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=_as_it_is,  # pyright: ignore[reportArgumentType]  # rows come as one tensor
            persistent_workers=self.num_workers > 0,
            **options,
        )


class _Rows(Dataset[Tensor]):
    """The rows of a tensor; those of a batch are fetched at once."""

    def __init__(self, images: Tensor) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Tensor:
        return self._images[index]

    def __getitems__(self, indices: list[int]) -> Tensor:
        return self._images[indices]


def _as_it_is(batch: Tensor) -> Tensor:
    return batch


def _check(
    levels: int | None,
    batch_size: int,
    validation_fraction: float,
    test_fraction: float,
    size: int | None,
) -> None:
    for name, value, least in (("levels", levels, 2), ("batch_size", batch_size, 1)):
        if value is not None and value < least:
            raise ValueError(f"`{name}` is {value}, but must be at least {least}.")
    if size is not None and size < 2:
        raise ValueError(f"`size` is {size}, but must be at least 2 pixels.")
    if not (0 < validation_fraction < 1 and 0 <= test_fraction < 1):
        raise ValueError(
            f"`validation_fraction` is {validation_fraction} and `test_fraction` {test_fraction}, "
            "but both must lie between 0 and 1. Try 0.1."
        )


def _split(
    pictures: Pictures, validation_fraction: float, test_fraction: float
) -> dict[str, Tensor]:
    """Deal the pictures out to the three parts; parts that the data name stay as they are."""
    rest, validation, test = pictures.train, pictures.validation, pictures.test
    num_images = len(rest)
    generator = torch.Generator().manual_seed(_SPLIT_SEED)
    rest = rest[torch.randperm(num_images, generator=generator)]
    if test is None:
        num_test = round(test_fraction * num_images)
        test, rest = rest[:num_test], rest[num_test:]
    if validation is None:
        num_validation = max(1, round(validation_fraction * num_images))
        validation, rest = rest[:num_validation], rest[num_validation:]
    if not len(rest):
        raise ValueError(
            f"{pictures.name} has {num_images} pictures, of which none are left to train on. Give "
            "more pictures, or smaller `--data.validation_fraction` and `--data.test_fraction`."
        )
    return {"train": rest, "validation": validation, "test": test}


def _reduced(images: Tensor, levels_given: int, levels: int) -> Tensor:
    """Merge neighbouring grey levels until there are `levels` of them."""
    if levels == levels_given:
        return images
    if levels > levels_given:
        raise ValueError(
            f"`levels` is {levels}, but the pictures have {levels_given}. Give at most that many."
        )
    return (images.to(torch.int32) * levels // levels_given).to(torch.uint8)
