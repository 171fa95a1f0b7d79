"""Train a flow: ``recoup flow fit``.

::

    recoup flow fit                                             # the built-in digits
    recoup flow fit --config realnvp-mnist --data mnist.npz     # settings that come with the recipe
    recoup flow fit --config realnvp-moons                      # a density in the plane
    recoup flow fit --data pictures/ --memory constant --epochs 50 --out runs/mine
    recoup flow fit --resume runs/mine/checkpoints/last.ckpt --epochs 100
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from lightning.pytorch.cli import LightningArgumentParser

from recoup.recipes.flow.data import Images
from recoup.recipes.flow.model import FlowTraining
from recoup.recipes.flow.results import write_results
from recoup.recipes.training import TrainingCLI, fit_command

__all__ = ["CONFIGS", "MONITOR", "prepare", "train"]

CONFIGS = Path(__file__).parent / "configs"
MONITOR = "val_bits_per_dim"
_NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def _listed(names: Sequence[str]) -> str:
    """Wrap names to the width of the help, a line for each first word."""
    firsts = dict.fromkeys(name.partition("-")[0] for name in names)
    lines = [", ".join(name for name in names if name.startswith(f"{first}-")) for first in firsts]
    return "".join(f"\n                       {line}" for line in lines)


_HELP = f"""\
usage: recoup flow fit [options]

Train a flow on pictures, or on points in the plane. Options, each as --name VALUE:

  --data PATH        a folder of pictures, an .npz file, moons, rings or checkerboard; the built-in
                     digits if left out
  --memory MODE      what backward remembers: linear, sqrt, log, constant, or a number of slots
  --epochs N         number of epochs (30)
  --batch-size N     pictures in a batch (64)
  --out DIR          folder of the run (runs/flow/fit-1, or the next number)
  --seed N           seed of weights, order, noise and dropout (0)
  --threads N        threads on CPU
  --resume CKPT      go on from a checkpoint, with its settings, in its folder
  --finetune CKPT    begin a new run with the weights of a checkpoint, and its settings
  --config FILE      settings from a file, or of the recipe:{_listed(_NAMES)}
  --model.flow NAME  glow, nice, realnvp, flowpp or iresnet (glow)
  --model.conditional true
                     learn the density given the label, for data with labels
  --data.size N      crop and resize the pictures to N x N
  --data.levels N    number of grey levels to train on (those of the pictures)
  --model.num_levels, --model.num_steps, --model.width, --model.depth, --model.dropout
                     the flow: scales, steps at each, channels in its networks, ...
  --model.learning_rate, --model.optimizer, --early_stopping.patience, ...
  --trainer.accelerator, --trainer.devices, --trainer.precision, ...
                     any setting of Lightning's Trainer

  --help-all         explain all settings
  --print_config     print all settings, as a file for --config"""


class _FlowCLI(TrainingCLI):
    """Hands labels out where the model is conditional."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.link_arguments("model.conditional", "data.conditional")

    def _long_names(self, args: Sequence[str]) -> list[str]:
        long = super()._long_names(args)
        for option, value in pairwise(long):
            if option == "--config" and not Path(value).exists() and not Path(value).suffix:
                raise ValueError(
                    f"`--config` is {value}, which is neither a file nor one of "
                    f"{', '.join(_NAMES)}. Give one of these."
                )
        return long


def prepare(args: Sequence[str]) -> TrainingCLI:
    """Check the arguments of ``recoup flow fit``, and build what is trained; nothing is written.

    Args:
        args: The arguments, as on the command line.

    Raises:
        MistakeError: When something is wrong that the user can mend.
    """
    return _FlowCLI(
        FlowTraining,
        Images,
        recipe="flow",
        configs=CONFIGS,
        links=[
            ("data.shape", "model.shape"),
            ("data.levels", "model.levels"),
            ("data.num_classes", "model.num_classes"),
        ],
        monitor=MONITOR,
        args=args,
        trainer_defaults={"gradient_clip_val": 10.0},
    )


def train(args: Sequence[str]) -> int:
    """Run ``recoup flow fit`` with these arguments; return the exit code."""
    runs: list[TrainingCLI] = []

    def prepared(args: Sequence[str]) -> TrainingCLI:
        runs.append(prepare(args))
        return runs[-1]

    code = fit_command(
        args, usage=_HELP, prepare=prepared, description=_description, score="{:.3f} bits/dim"
    )
    for run in runs:  # none, if only help was asked for
        write_results(run)
    return code


def _description(run: TrainingCLI) -> str:
    data, model = run.datamodule, run.model
    counts = ", ".join(f"{len(images)} for {part}" for part, images in data.parts.items())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    sizes = " x ".join(map(str, data.shape))
    form = f"{sizes}, {data.levels} levels" if len(data.shape) > 1 else "points in the plane"
    classes = f", {data.num_classes} classes" if data.num_classes else ""
    return (
        f"data: {data.name}, {form}{classes}; {counts}\n"
        f"flow: {model.hparams['flow']}, {num_parameters:,} parameters, "
        f"memory {model.hparams['memory']}; run: {run.out}"
    )
