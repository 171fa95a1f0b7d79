"""Checks before a language model is trained: its Trainer, and the memory of its steps."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from recoup.recipes.training_run import TrainingRun

__all__ = ["check_trainer", "prepare_memory"]


def check_trainer(run: TrainingRun, prefix: str) -> None:
    """Raise a ValueError if the Trainer has a setting that this recipe does not support.

    Args:
        run: The run.
        prefix: What stands before the names of such settings where they are given.
    """
    trainer = run.trainer
    if trainer.gradient_clip_val:
        raise ValueError(
            f"`{prefix}gradient_clip_val` is {trainer.gradient_clip_val}, but gradients are "
            "clipped by `clip` of the model here. Give that."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"`{prefix}accumulate_grad_batches` is {trainer.accumulate_grad_batches}, but "
            "each window is a step here. Give a larger batch, and bytes as `memory` if it does not "
            "fit."
        )
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise ValueError(
            f"`{prefix}strategy` is a {type(trainer.strategy).__name__}, which was not "
            "tried with this recipe. Give ddp, or one device."
        )
    if trainer.precision in ("16-mixed", "16-true"):
        raise ValueError(
            f"`{prefix}precision` is {trainer.precision}, in which gradients of means over "
            "a window are too small without a scale of the loss; that was not tried with this "
            "recipe. Give bf16-mixed."
        )
    if trainer.precision == "bf16-true" and run.model.averaging != "never":
        raise ValueError(
            f"`{prefix}precision` is bf16-true, in which an average over hundreds of steps "
            "stands still. Give bf16-mixed, or never as `averaging` of the model."
        )
    if trainer.reload_dataloaders_every_n_epochs != 1:
        raise ValueError(
            f"`{prefix}reload_dataloaders_every_n_epochs` is "
            f"{trainer.reload_dataloaders_every_n_epochs}, but each epoch has windows of its own "
            "here. Leave it out."
        )


def prepare_memory(run: TrainingRun) -> None:
    """Measure the memory of a step, if it is bounded, on the run's device, in its precision."""
    data, precision = run.datamodule, run.trainer.precision_plugin
    precision.convert_module(run.model)
    with run.threads(), precision.forward_context():
        run.model.prepare_memory(data.batch_size, data.longest, run.trainer.strategy.root_device)
