"""The command ``recoup flow fit``: train a flow.

::

    recoup flow fit                                             # the built-in digits
    recoup flow fit --config realnvp-mnist --data mnist.npz     # settings that come with the recipe
    recoup flow fit --config realnvp-moons                      # a density in the plane
    recoup flow fit --data pictures/ --memory constant --epochs 50 --out runs/mine
    recoup flow fit --data pictures/ --memory "1 GiB"           # as fast as so many bytes allow
    recoup flow fit --resume runs/mine/checkpoints/last.ckpt --epochs 100
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from recoup.recipes.flow.data import Images
from recoup.recipes.flow.model import FlowTraining
from recoup.recipes.flow.steps import MONITOR, TRAINER, measured_step
from recoup.recipes.results import results_of
from recoup.recipes.training import TrainingCLI, fit_command
from recoup_cli.commands import FLOW

__all__ = ["CONFIGS", "prepare", "train"]

CONFIGS = FLOW.configs


class _FlowCLI(TrainingCLI):
    """The command line of flows: gives labels to the batches of a conditional model."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.link_arguments("model.conditional", "data.conditional")


def prepare(args: Sequence[str]) -> TrainingCLI:
    """Check the arguments of ``recoup flow fit``, and build model and data, without writing.

    Args:
        args: The arguments, as on the command line.

    Raises:
        MistakeError: When the user has to correct something.
    """
    return _FlowCLI(
        FlowTraining,
        Images,
        recipe="flow",
        fit=FLOW,
        links=[
            ("data.shape", "model.shape"),
            ("data.levels", "model.levels"),
            ("data.num_classes", "model.num_classes"),
        ],
        monitor=MONITOR,
        args=args,
        trainer_defaults=TRAINER,
    )


def train(args: Sequence[str]) -> int:
    """Run ``recoup flow fit`` with these arguments; return the exit code."""
    return fit_command(
        args,
        prepare=prepare,
        description=_description,
        score="{:.3f} bits/dim",
        results=_results,
    )


def _results(run: TrainingCLI) -> dict[str, Any] | None:
    settings = run.model.hparams
    about = {"flow": settings["flow"], "memory": str(settings["memory"])}
    return results_of(run, measured_step, **about)


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
