"""Train a flow: ``recoup flow fit``.

::

    recoup flow fit                                             # the built-in digits
    recoup flow fit --config glow-mnist --data mnist.npz        # settings that come with the recipe
    recoup flow fit --data pictures/ --memory constant --epochs 50 --out runs/mine
    recoup flow fit --resume runs/mine/checkpoints/last.ckpt --epochs 100
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recoup.recipes.flow.data import Images
from recoup.recipes.flow.model import FlowTraining
from recoup.recipes.training import TrainingCLI, fit_command

__all__ = ["CONFIGS", "MONITOR", "prepare", "train"]

CONFIGS = Path(__file__).parent / "configs"
MONITOR = "val_bits_per_dim"


_HELP = f"""\
usage: recoup flow fit [options]

Train a Glow on pictures. Options, each as --name VALUE:

  --data PATH        a folder of pictures, or an .npz file; the built-in digits if left out
  --memory MODE      what backward remembers: linear, sqrt, log, constant, or a number of slots
  --epochs N         number of epochs (30)
  --batch-size N     pictures in a batch (64)
  --out DIR          folder of the run (runs/flow/fit-1, or the next number)
  --seed N           seed of weights, order, noise and dropout (0)
  --threads N        threads on CPU
  --resume CKPT      go on from a checkpoint, with its settings, in its folder
  --finetune CKPT    begin a new run with the weights of a checkpoint, and its settings
  --config FILE      settings from a file, or of the recipe: {
    ", ".join(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
}
  --data.size N      crop and resize the pictures to N x N
  --data.levels N    number of grey levels to train on (those of the pictures)
  --model.num_levels, --model.num_steps, --model.width, --model.coupling, --model.dropout
                     the flow: scales, steps at each, channels in its networks, ...
  --model.learning_rate, --model.optimizer, --early_stopping.patience, ...
  --trainer.accelerator, --trainer.devices, --trainer.precision, ...
                     any setting of Lightning's Trainer

  --help-all         explain all settings
  --print_config     print all settings, as a file for --config"""


def prepare(args: Sequence[str]) -> TrainingCLI:
    """Check the arguments of ``recoup flow fit``, and build what is trained; nothing is written.

    Args:
        args: The arguments, as on the command line.

    Raises:
        MistakeError: When something is wrong that the user can mend.
    """
    return TrainingCLI(
        FlowTraining,
        Images,
        recipe="flow",
        configs=CONFIGS,
        links=[("data.shape", "model.shape"), ("data.levels", "model.levels")],
        monitor=MONITOR,
        args=args,
        trainer_defaults={"gradient_clip_val": 10.0},
    )


def train(args: Sequence[str]) -> int:
    """Run ``recoup flow fit`` with these arguments; return the exit code."""
    return fit_command(
        args, usage=_HELP, prepare=prepare, description=_description, score="{:.3f} bits/dim"
    )


def _description(run: TrainingCLI) -> str:
    data, model = run.datamodule, run.model
    counts = ", ".join(f"{len(images)} for {part}" for part, images in data.parts.items())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    sizes = " x ".join(map(str, data.shape))
    return (
        f"data: {data.name}, {sizes}, {data.levels} levels; {counts}\n"
        f"flow: {num_parameters:,} parameters, memory {model.hparams['memory']}; run: {run.out}"
    )
