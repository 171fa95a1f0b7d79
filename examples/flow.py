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
from pictures import density_picture, grid
from samples import read_samples
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import recoup
from recoup.flows import Flow

Batch = list[Tensor]  # samples, and labels if the flow is conditional

# --- data ----------------------------------------------------------------------------------------


class Images(LightningDataModule):
    """Pictures or points in training, validation and test parts.

    A batch is samples, ``(N, C, H, W)`` of grey levels or ``(N, 2)``, and labels ``(N,)`` with
    `conditional`. The order of an epoch follows from `seed` and its number alone, so that a resumed
    run goes on as if it had not been interrupted.

    Args:
        path: A folder of pictures, an .npz of pictures or points, moons, rings or checkerboard;
            scikit-learn's digits if None. See `samples.read_samples`.
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
        known_levels, self.parts, self.labels = read_samples(path, size)
        self.name = path or "the digits"
        self.batch_size, self.conditional, self.seed = batch_size, conditional, seed
        self._split(test=test_fraction, validation=validation_fraction)
        self.levels = known_levels if levels is None else levels
        if levels is not None and levels != known_levels:
            if known_levels is None or not 2 <= levels <= known_levels:
                raise ValueError(
                    f"`levels` is {levels}, but the data have {known_levels or 'none, as points'}. "
                    "Give at least 2 and at most as many, or leave it out."
                )
            for part, images in self.parts.items():  # neighbouring levels become one
                self.parts[part] = (images.int() * levels // known_levels).to(torch.uint8)
        for part, samples in self.parts.items() if conditional else ():
            labels = self.labels.get(part, torch.empty(0))
            if len(labels) != len(samples) or labels.min() < 0:
                raise ValueError(
                    f"`conditional` is true, but {self.name} has no label, a whole number from 0, "
                    f"for each sample of its {part} part. Give an .npz with `train_labels` and "
                    "`test_labels`."
                )

    def _split(self, **fractions: float) -> None:
        """Take the parts that the data do not name from that of training, at random.

        The split does not follow the seed of a run, so that runs are compared on the same samples,
        and a checkpoint is tested on those that it has not seen.
        """
        num_samples = len(self.parts["train"])
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(0))
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
                whole |= {part: whole["train"][chosen] for part, chosen in rows.items()}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``(C, H, W)`` of one picture, or ``(2,)`` of a point."""
        return tuple(self.parts["train"].shape[1:])

    @property
    def num_classes(self) -> int | None:
        """One more than the largest label; None if batches hold no labels."""
        if not self.conditional:
            return None
        return 1 + max(int(labels.max()) for labels in self.labels.values())

    def _loader(self, part: str, sampler: Any = None, size: int | None = None) -> DataLoader[Any]:
        labels = [self.labels[part]] if self.conditional else []
        dataset = TensorDataset(self.parts[part], *labels)
        return DataLoader(dataset, batch_size=size or self.batch_size, sampler=sampler)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return batches of the training part, in an order set by `seed` and the epoch."""
        trainer, samples = self.trainer, self.parts["train"]
        ranks, rank = (1, 0) if trainer is None else (trainer.world_size, trainer.global_rank)
        # Its order is a function of the seed and of the epoch, which the Trainer sets.
        order = DistributedSampler(TensorDataset(samples), ranks, rank, seed=self.seed)
        return self._loader("train", sampler=order)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("validation")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the training part in one batch, beside which the density of points is drawn."""
        return self._loader("train", size=len(self.parts["train"]))


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
        self.save_hyperparameters(ignore="flow")
        flow.memory = memory  # pyright: ignore[reportAttributeAccessIssue]  # checked by the flow
        self.flow = flow

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch: its mean bits per dimension."""
        return self._step("train", batch, self.current_epoch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._step("val", batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._step("test", batch, batch_idx)

    def _step(self, stage: str, batch: Batch, *key: int) -> Tensor:
        torch.manual_seed(seed_at(self.hparams["seed"], self.global_rank, stage, *key))
        parts = {name: bits.mean() for name, bits in self.flow.parts(*batch).items()}
        loss = torch.stack(list(parts.values())).sum()
        metrics = {**parts, "bits_per_dim": loss}
        if len(self.flow.shape) == 1:
            metrics["nats_per_point"] = loss * (self.flow.num_dims * math.log(2))
        named = {f"{stage}_{name}": value.detach() for name, value in metrics.items()}
        options: Any = {"on_epoch": True, "sync_dist": True, "batch_size": len(batch[0])}
        self.log_dict(named, prog_bar=stage == "val", on_step=False, **options)
        return loss

    def on_fit_end(self) -> None:
        """Say what a step took, but for that of the optimizer."""
        trainer: Any = self.trainer
        batch = trainer.strategy.batch_to_device(next(iter(trainer.train_dataloader)))

        def step() -> None:
            self.flow.train().bits_per_dim(*batch).mean().backward()

        cost = recoup.measure(step, device=self.device)
        bits = float(trainer.callback_metrics.get("val_bits_per_dim", math.nan))
        self.print(f"memory {self.flow.memory}: {bits:.4f} bits/dim validated, a step took {cost}")

    def configure_optimizers(self) -> Any:
        settings: Any = self.hparams
        kind = {"adam": torch.optim.Adam, "adamax": torch.optim.Adamax}[settings.optimizer]
        optimizer = kind(self.flow.parameters(), lr=settings.learning_rate)

        def rate(step: int) -> float:
            warmed = min(1.0, (step + 1) / max(1, settings.num_warmup_steps))
            if settings.num_decay_steps is None:
                return warmed
            decayed = math.cos(math.pi * min(1.0, step / settings.num_decay_steps))
            return warmed * (0.5 + 0.5 * decayed)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def predict_step(self, batch: Batch, batch_idx: int) -> None:
        """Draw pictures into ``samples.png`` of the run, or the density of points.

        Of a conditional flow each class has a row; a density is that of all classes together.
        """
        settings: Any = self.hparams
        flow, num_classes = self.flow, self.flow.num_classes
        if len(flow.shape) == 1:
            picture = density_picture(flow, *batch)
        else:
            count, labels, columns = settings.num_samples, None, None
            if num_classes is not None:
                columns = max(1, count // num_classes)
                labels = torch.arange(num_classes).repeat_interleave(columns)
                count = len(labels)
            draw = torch.Generator().manual_seed(settings.seed)
            images = flow.sample(
                count, labels=labels, temperature=settings.temperature, generator=draw
            )
            picture = grid(images.cpu(), flow.levels or 256, columns)
        path = Path(self.trainer.log_dir or ".", "samples.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
        print(f"samples: {path}")


def main(args: Sequence[str] | None = None, *, run: bool = True) -> TrainingCLI:
    """Run the command line with these arguments, those of the process if None."""
    return TrainingCLI(
        FlowTraining,
        Images,
        name="flow",
        monitor="val_bits_per_dim",
        of_data={name: f"flow.init_args.{name}" for name in ("shape", "levels", "num_classes")},
        args=args,
        run=run,
        trainer_defaults={"gradient_clip_val": 10.0},
    )


if __name__ == "__main__":
    main()
