"""Training data: pictures, or points in the plane, split into parts and ordered."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from recoup.recipes.checkpoints import full_path
from recoup.recipes.checks import check_at_least
from recoup.recipes.flow.points import TOYS
from recoup.recipes.flow.reading import Samples, read_samples

__all__ = ["Batch", "Images", "SampleBatches"]

Batch = Tensor | tuple[Tensor, Tensor]  # with labels, if the flow is conditional

# The split does not follow the seed of a run: runs with different seeds are compared on the same
# pictures, and a checkpoint is evaluated on data unseen in its training.
_SPLIT_SEED = 0


class SampleBatches(LightningDataModule):
    """Samples in training, validation and test parts, as batches ``(N, C, H, W)`` or ``(N, 2)``.

    With `conditional` a batch is a pair: the pictures or points, and their labels ``(N,)``.

    The split into parts depends on the data alone; the order of epoch e depends on `seed` and e
    alone, so that a resumed run continues as if it had not been interrupted.

    Args:
        samples: Pictures or points, in the parts that they come in.
        levels: Number of grey levels to train on; those of the samples if None.
        batch_size: Number of samples in a batch.
        validation_fraction: Part of the samples that validates each epoch.
        test_fraction: Part of the samples kept for the end, if they have no test part.
        num_workers: Number of processes that put batches together.
        seed: Seed of the order of the training samples.
        conditional: Whether batches hold labels.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        levels: int | None = None,
        batch_size: int = 64,
        validation_fraction: float = 0.1,
        test_fraction: float = 0.1,
        num_workers: int = 0,
        seed: int = 0,
        conditional: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, num_workers=num_workers)
        if not (0 < validation_fraction < 1 and 0 <= test_fraction < 1):
            raise ValueError(
                f"`validation_fraction` is {validation_fraction} and `test_fraction` "
                f"{test_fraction}, but both must lie between 0 and 1. Try 0.1."
            )
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.name = samples.name
        self.levels = _levels(samples, levels)
        self.has_test_part = samples.test is not None
        self.parts, labels = _split(samples, validation_fraction, test_fraction)
        if samples.levels is not None and self.levels is not None:
            for part, images in self.parts.items():
                self.parts[part] = _reduced(images, samples.levels, self.levels)
        self.labels = _checked(labels, self) if conditional else {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``(C, H, W)`` of one picture, or ``(2,)`` of a point."""
        return tuple(self.parts["train"].shape[1:])

    @property
    def num_classes(self) -> int | None:
        """One more than the largest label; None if batches hold no labels."""
        if not self.labels:
            return None
        return 1 + max(int(labels.max()) for labels in self.labels.values() if len(labels))

    @property
    def can_test(self) -> bool:
        """Whether there is a sample to test."""
        return len(self.parts["test"]) > 0

    def train_dataloader(self) -> DataLoader[Any]:
        """Return batches of the training part, in an order set by `seed` and the epoch."""
        dataset = self._rows("train")
        # Its order is a function of the seed and of the epoch, which the Trainer sets.
        sampler = DistributedSampler(
            dataset,
            num_replicas=1 if self.trainer is None else self.trainer.world_size,
            rank=0 if self.trainer is None else self.trainer.global_rank,
            seed=self.seed,
        )
        return self._loader(dataset, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return batches of the validation part."""
        return self._loader(self._rows("validation"))

    def test_dataloader(self) -> DataLoader[Any]:
        """Return batches of the test part."""
        return self._loader(self._rows("test"))

    def test_on_everything(self) -> None:
        """Make all pictures the test part, for data unseen in training."""
        self.parts["test"] = torch.cat(list(self.parts.values()))
        if self.labels:
            self.labels["test"] = torch.cat(list(self.labels.values()))

    def _rows(self, part: str) -> _Rows:
        return _Rows(self.parts[part], self.labels.get(part))

    def _loader(self, dataset: _Rows, **options: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=_as_it_is,  # pyright: ignore[reportArgumentType]  # rows come as one tensor
            persistent_workers=self.num_workers > 0,
            **options,
        )


class Images(SampleBatches):
    """Pictures in training, validation and test parts, as batches ``(N, C, H, W)`` of grey levels.

    Of a density in the plane the batches are points ``(N, 2)``. With `conditional` a batch is a
    pair: the pictures or points, and their labels ``(N,)``.

    All pictures are held in memory, a byte a value. The split into parts depends on the data
    alone; the order of epoch e depends on `seed` and e alone, so that a resumed run continues as if
    it had not been interrupted.

    Args:
        path: A folder of pictures (searched with its subfolders); an .npz file of pictures (uint8)
            or of points in the plane; a .csv file of points; or moons, rings or checkerboard;
            scikit-learn's handwritten digits if None.
        levels: Number of grey levels to train on; those of the data if None.
        batch_size: Number of pictures in a batch.
        validation_fraction: Part of the pictures that validates each epoch.
        test_fraction: Part of the pictures kept for the end, if the data have no test part.
        size: Side of a square to which all pictures are cropped and resized; None to take them
            as they are.
        num_workers: Number of processes that put batches together.
        seed: Seed of the order of the training pictures.
        conditional: Whether batches hold labels.
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
        conditional: bool = False,
    ) -> None:
        check_at_least(2, levels=levels, size=size)
        super().__init__(
            read_samples(path, size),
            levels=levels,
            batch_size=batch_size,
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
            num_workers=num_workers,
            seed=seed,
            conditional=conditional,
        )
        self.save_hyperparameters()
        self.path = path

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data for a checkpoint: the path."""
        return {"path": None if self.path in TOYS else full_path(self.path)}


class _Rows(Dataset[Any]):
    """The rows of a tensor, and their labels if there are any; a batch is fetched at once."""

    def __init__(self, images: Tensor, labels: Tensor | None) -> None:
        self._images = images
        self._labels = labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: Any) -> Any:
        rows = self._images[index]
        return rows if self._labels is None else (rows, self._labels[index])

    def __getitems__(self, indices: list[int]) -> Any:
        return self[indices]


def _as_it_is(batch: Any) -> Any:
    return batch


def _levels(samples: Samples, levels: int | None) -> int | None:
    if levels is not None and samples.levels is None:
        raise ValueError(f"`levels` is {levels}, but {samples.name} are points. Leave it out.")
    return samples.levels if levels is None else levels


Parts = dict[str, Tensor]


def _split(
    samples: Samples, validation_fraction: float, test_fraction: float
) -> tuple[Parts, Parts]:
    """Split pictures and their labels into three parts; parts that the data name do not change.

    Labels of a part are left out if their number is not that of its pictures.
    """
    num_samples = len(samples.train)
    named = {"train": samples.train, "validation": samples.validation, "test": samples.test}
    images: Parts = {part: rows for part, rows in named.items() if rows is not None}
    labels = {
        part: values.long()
        for part, values in samples.labels.items()
        if part in images and values.shape == images[part].shape[:1]
    }
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(_SPLIT_SEED))
    taken = 0
    for part, count in (
        ("test", round(test_fraction * num_samples)),
        ("validation", max(1, round(validation_fraction * num_samples))),
    ):
        if part not in images:
            rows, taken = order[taken : taken + count], taken + count
            images[part] = samples.train[rows]
            if "train" in labels:
                labels[part] = labels["train"][rows]
    rows = order[taken:]
    if not len(rows):
        what = "points" if samples.levels is None else "pictures"
        raise ValueError(
            f"{samples.name} has {num_samples} {what}, and none are left to train on. Give "
            "more, or smaller fractions for validation and test."
        )
    images["train"] = samples.train[rows]
    if "train" in labels:
        labels["train"] = labels["train"][rows]
    return {part: images[part] for part in named}, {
        part: labels[part] for part in named if part in labels
    }


def _checked(labels: Parts, images: SampleBatches) -> Parts:
    """Return the labels, or raise a ValueError if a part has none, or one is negative."""
    for part, rows in images.parts.items():
        if part not in labels:
            raise ValueError(
                f"`--model.conditional` is true, but {images.name} has no label for each picture "
                f"of its {part} part. Give an .npz with arrays of whole numbers, such as "
                "train_labels and test_labels."
            )
        if len(rows) and int(labels[part].min()) < 0:
            raise ValueError(
                f"The labels of {images.name} hold {int(labels[part].min())}, but classes are "
                "numbered from 0. Renumber them."
            )
    return labels


def _reduced(images: Tensor, levels_given: int, levels: int) -> Tensor:
    """Merge neighbouring grey levels until there are `levels` of them."""
    if levels == levels_given:
        return images
    if levels > levels_given:
        raise ValueError(
            f"`levels` is {levels}, but the pictures have {levels_given}. Give at most that many."
        )
    return (images.to(torch.int32) * levels // levels_given).to(torch.uint8)
