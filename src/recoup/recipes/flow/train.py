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
from recoup.recipes.training import TrainingCLI

__all__ = ["CONFIGS", "MONITOR", "prepare", "train"]

CONFIGS = Path(__file__).parent / "configs"
MONITOR = "val_bits_per_dim"


def prepare(args: Sequence[str]) -> TrainingCLI:
    """Check the arguments of ``recoup flow fit``, and build what is trained; nothing is written.

    Args:
        args: The arguments, as on the command line.

    Raises:
        Mistake: When something is wrong that the user can mend.
    """
    return TrainingCLI(
        FlowTraining,
        Images,
        recipe="flow",
        configs=CONFIGS,
        links=[("data.shape", "model.shape"), ("data.levels", "model.levels")],
        monitor=MONITOR,
        args=args,
    )


def train(args: Sequence[str]) -> int:
    """Run ``recoup flow fit`` with these arguments; return the exit code."""
    run = prepare(args)
    _announce(run)
    run.fit()
    score = run.trainer.checkpoint_callback.best_model_score  # pyright: ignore
    print(f"best checkpoint: {run.best_checkpoint} ({float(score):.3f} bits/dim in validation)")
    print(f"metrics: {run.out / 'metrics.csv'}")
    return 0


def _announce(run: TrainingCLI) -> None:
    data, model = run.datamodule, run.model
    counts = ", ".join(f"{len(images)} for {part}" for part, images in data.parts.items())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    sizes = " x ".join(map(str, data.shape))
    print(f"data: {data.name}, {sizes}, {data.levels} levels; {counts}")
    print(f"flow: {num_parameters:,} parameters, memory {model.hparams['memory']}; run: {run.out}")
