"""Train a normalizing flow on pictures or points, in the memory you choose.

    config=examples/configs/flow/glow-digits.yaml                 # scikit-learn's digits
    python examples/flow.py fit -c $config --model.memory constant
    python examples/flow.py fit --model.flow RealNVP --data.path moons    # a density in the plane
    python examples/flow.py fit -c examples/configs/flow/glow-pictures.yaml --data.path pictures/

A run goes to ``runs/flow/version_0``, or the next number. Go on with it, test it, draw from it:

    run=runs/flow/version_0
    python examples/flow.py fit -c $run/config.yaml --ckpt_path $run/checkpoints/last.ckpt
    python examples/flow.py test -c $run/config.yaml --ckpt_path $run/checkpoints/best.ckpt
    python examples/flow.py predict -c $run/config.yaml --ckpt_path $run/checkpoints/best.ckpt

Every option: ``python examples/flow.py fit --help``; of a flow: ``--model.flow.help Glow``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from command_line import TrainingCLI, seed_at
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from pictures import density_picture, grid
from samples import read_samples
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from recoup.flows import Flow

Batch = list[Tensor]  # samples, and labels if the flow is conditional

# The split does not follow the seed of a run, so that runs are compared on the same pictures, and a
# checkpoint is tested on those that it has not seen.
_SPLIT_SEED = 0


# --- data ----------------------------------------------------------------------------------------


class Images(LightningDataModule):
    """Pictures or points in training, validation and test parts.

    A batch is samples, ``(N, C, H, W)`` of grey levels or ``(N, 2)``, and labels ``(N,)`` with
    `conditional`. The order of an epoch follows from `seed` and its number alone, so that a resumed
    run goes on as if it had not been interrupted.

    Args:
        path: What `samples.read_samples` reads: a folder of pictures, an .npz, a .csv of points,
            moons, rings or checkerboard; scikit-learn's digits if None.
        levels: Number of grey levels to train on; those of the pictures if None.
        batch_size: Number of samples in a batch.
        validation_fraction: Part of the samples that validates each epoch, if none are named.
        test_fraction: Part of the samples kept for the end, if none are named.
        size: Side of a square to which the pictures of a folder are cropped and resized.
        conditional: Whether batches hold labels, for a flow of the density given the label.
        seed: Seed of the order of the training samples.
    """

    def __init__(
        self,
        path: str | None = None,
        levels: int | None = None,
        batch_size: int = 64,
        validation_fraction: float = 0.1,
        test_fraction: float = 0.1,
        size: int | None = None,
        conditional: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        samples = read_samples(path, size)
        self.name = samples.name
        self.batch_size = batch_size
        self.conditional = conditional
        self.seed = seed
        self.levels = samples.levels if levels is None else levels
        self.parts, self.labels = dict(samples.parts), dict(samples.labels)
        self._split(test=test_fraction, validation=validation_fraction)
        if self.levels != samples.levels:
            for part, images in self.parts.items():
                self.parts[part] = _merged(images, samples.levels, self.levels)
        for part, each in self.parts.items() if conditional else ():
            if len(self.labels.get(part, ())) != len(each) or int(self.labels[part].min()) < 0:
                raise ValueError(
                    f"`conditional` is true, but {self.name} has no label, a whole number from 0, "
                    f"for each sample of its {part} part. Give an .npz with `train_labels` and "
                    "`test_labels`."
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``(C, H, W)`` of one picture, or ``(2,)`` of a point."""
        return tuple(self.parts["train"].shape[1:])

    @property
    def num_classes(self) -> int | None:
        """One more than the largest label; None if batches hold no labels."""
        if not self.conditional:
            return None
        return 1 + max(int(self.labels[part].max()) for part in self.parts)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return batches of the training part, in an order set by `seed` and the epoch."""
        dataset, trainer = self._dataset("train"), self.trainer
        num_replicas, rank = (
            (1, 0) if trainer is None else (trainer.world_size, trainer.global_rank)
        )
        # Its order is a function of the seed and of the epoch, which the Trainer sets.
        order = DistributedSampler(dataset, num_replicas, rank, seed=self.seed)
        return DataLoader(dataset, batch_size=self.batch_size, sampler=order)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._dataset("validation"), batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._dataset("test"), batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the training part in one batch, beside which the density of points is drawn."""
        return DataLoader(self._dataset("train"), batch_size=len(self.parts["train"]))

    def _dataset(self, part: str) -> TensorDataset:
        labels = [self.labels[part]] if self.conditional else []
        return TensorDataset(self.parts[part], *labels)

    def _split(self, **fractions: float) -> None:
        """Take the parts that the data do not name from that of training, at random."""
        num_samples = len(self.parts["train"])
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(_SPLIT_SEED))
        rows: dict[str, Tensor] = {}
        for part, fraction in fractions.items():
            if not 0 < fraction < 1:
                raise ValueError(f"`{part}_fraction` is {fraction}, but must lie between 0 and 1.")
            if part not in self.parts:
                count = max(1, round(fraction * num_samples))
                rows[part], order = order[:count], order[count:]
        if not len(order):
            raise ValueError(
                f"{self.name} has {num_samples} samples, and none are left to train on. Give more, "
                "or smaller fractions for validation and test."
            )
        rows["train"] = order
        for whole in (self.parts, self.labels):
            if "train" in whole:
                whole |= {part: whole["train"][each] for part, each in rows.items()}


def _merged(images: Tensor, num_given: int | None, levels: int | None) -> Tensor:
    """Merge neighbouring grey levels until there are `levels` of them."""
    if num_given is None or levels is None or not 2 <= levels <= num_given:
        raise ValueError(
            f"`levels` is {levels}, but the data have {num_given or 'none, being points'}. Give at "
            "least 2 and at most as many, or leave it out."
        )
    return (images.to(torch.int32) * levels // num_given).to(torch.uint8)


# --- training ------------------------------------------------------------------------------------


class FlowTraining(LightningModule):
    """Train a flow: the loss is bits per dimension.

    Logged for each epoch, for training (``train_``) and validation (``val_``), and for ``test_``:
    `bits_per_dim` and its parts, `latent` and `log_det`, which add up to it; for points also
    `nats_per_point`, the mean of ``-log p(x)``.

    The draws of a step (noise of dequantization, dropout) follow from `seed`, the epoch and the
    number of the batch: they are the same in every memory mode and in a resumed run.

    Args:
        flow: The flow; shape, levels and classes are those of the data.
        memory: What backward remembers: "linear", "sqrt", "log", "constant", a number of slots, or
            the most bytes that a step of the chain may take, as "1 GiB".
        optimizer: The optimizer.
        learning_rate: The learning rate after the warm-up.
        num_warmup_steps: Number of steps in which the learning rate rises from 0.
        num_decay_steps: Number of the step at which the learning rate, falling along a cosine, has
            reached 0; None to let it stay.
        num_samples: Number of pictures that ``predict`` draws.
        temperature: Spread of their latents, 1 for that of training; less gives likelier pictures.
        seed: Seed of the draws of all steps.
    """

    def __init__(
        self,
        flow: Flow,
        memory: int | str = "linear",
        optimizer: Literal["adam", "adamax"] = "adam",
        learning_rate: float = 1e-3,
        num_warmup_steps: int = 50,
        num_decay_steps: int | None = None,
        num_samples: int = 64,
        temperature: float = 0.7,
        seed: int = 0,
    ) -> None:
        super().__init__()
        flow.memory = memory  # pyright: ignore[reportAttributeAccessIssue]  # checked by the flow
        self.flow = flow
        self.optimizer_class = {"adam": torch.optim.Adam, "adamax": torch.optim.Adamax}[optimizer]
        self.learning_rate = learning_rate
        self.num_warmup_steps = num_warmup_steps
        self.num_decay_steps = num_decay_steps
        self.num_samples = num_samples
        self.temperature = temperature
        self.seed = seed

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch: its mean bits per dimension."""
        return self._step("train", batch, self.current_epoch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._step("val", batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._step("test", batch, batch_idx)

    def _step(self, stage: str, batch: Batch, *key: int) -> Tensor:
        torch.manual_seed(seed_at(self.seed, self.global_rank, stage, *key))
        parts = {name: bits.mean() for name, bits in self.flow.parts(*batch).items()}
        loss = torch.stack(list(parts.values())).sum()
        metrics = {**parts, "bits_per_dim": loss}
        if len(self.flow.shape) == 1:
            metrics["nats_per_point"] = loss * (self.flow.num_dims * math.log(2))
        options: Any = {"on_step": False, "on_epoch": True, "sync_dist": True}
        options["batch_size"] = len(batch[0])
        for name, value in metrics.items():
            shown = (stage, name) == ("val", "bits_per_dim")
            self.log(f"{stage}_{name}", value.detach(), prog_bar=shown, **options)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_class(self.flow.parameters(), lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def _rate(self, step: int) -> float:
        """Return the factor on the learning rate at the step with this number."""
        rate = min(1.0, (step + 1) / max(1, self.num_warmup_steps))
        if self.num_decay_steps is not None:
            rate *= 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / self.num_decay_steps))
        return rate

    def predict_step(self, batch: Batch, batch_idx: int) -> None:
        """Draw pictures into ``samples.png`` of the run, or the density of points.

        Of a conditional flow each class has a row; a density is that of all classes together.
        """
        flow, num_classes = self.flow, self.flow.num_classes or 0
        if len(flow.shape) == 1:
            shares = (
                batch[1].bincount(minlength=num_classes) / len(batch[0]) if num_classes else None
            )
            picture = density_picture(flow, batch[0], shares)
        else:
            columns = max(1, self.num_samples // num_classes) if num_classes else None
            labels = torch.arange(num_classes).repeat_interleave(columns) if columns else None
            images = flow.sample(
                self.num_samples if labels is None else len(labels),
                labels=labels,
                temperature=self.temperature,
                generator=torch.Generator().manual_seed(self.seed),
            )
            picture = grid(images.cpu(), flow.levels or 256, columns)
        path = Path(self.trainer.log_dir or ".", "samples.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
        print(f"samples: {path}")


# --- command line --------------------------------------------------------------------------------


class FlowCLI(TrainingCLI):
    """The command line: a flow is built for its data."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link what the data know."""
        super().add_arguments_to_parser(parser)
        for name in ("shape", "levels", "num_classes"):
            target = f"model.flow.init_args.{name}"
            parser.link_arguments(f"data.{name}", target, apply_on="instantiate")


def main(args: Sequence[str] | None = None, *, run: bool = True) -> FlowCLI:
    """Run the command line with these arguments, those of the process if None."""
    return FlowCLI(
        FlowTraining,
        Images,
        name="flow",
        monitor="val_bits_per_dim",
        args=args,
        run=run,
        trainer_defaults={"gradient_clip_val": 10.0},
    )


if __name__ == "__main__":
    main()
