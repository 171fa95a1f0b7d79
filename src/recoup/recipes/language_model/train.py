"""The command ``recoup lm fit``: train a language model.

::

    recoup lm fit                                             # the documentation of Python
    recoup lm fit --config awd-lstm-wt2 --data wikitext-2/    # settings that come with the recipe
    recoup lm fit --data book.txt --memory "200 MiB" --out runs/mine
    recoup lm fit --resume runs/mine/checkpoints/last.ckpt --epochs 100
    recoup lm fit --finetune runs/mine/checkpoints/best.ckpt
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.language_model.data import Texts
from recoup.recipes.language_model.model import MONITOR, LanguageModelTraining
from recoup.recipes.language_model.trained import load_vocabulary
from recoup.recipes.language_model.windows import MAX_JITTER
from recoup.recipes.mistakes import mistakes_reported
from recoup.recipes.training import TrainingCLI, fit_command
from recoup_cli.commands import LANGUAGE_MODEL

__all__ = ["CONFIGS", "prepare", "train"]

CONFIGS = LANGUAGE_MODEL.configs


def prepare(args: Sequence[str]) -> TrainingCLI:
    """Check the arguments of ``recoup lm fit``, and build model and data, without writing.

    Args:
        args: The arguments, as on the command line.

    Raises:
        MistakeError: When the user has to correct something.
    """
    run = TrainingCLI(
        LanguageModelTraining,
        Texts,
        recipe="lm",
        fit=LANGUAGE_MODEL,
        links=[("data.vocab_size", "model.vocab_size"), ("data.bptt", "model.bptt")],
        monitor=MONITOR,
        # Each epoch has other windows.
        trainer_defaults={"reload_dataloaders_every_n_epochs": 1},
        finetuning={"averaging": "always"},
        args=args,
    )
    with mistakes_reported():
        _check_trainer(run)
        if run.checkpoint is not None:
            _check_same_vocabulary(run, run.checkpoint)
        run.datamodule.val_dataloader()  # raises if the part is too short
        _prepare_memory(run)
    return run


def train(args: Sequence[str]) -> int:
    """Run ``recoup lm fit`` with these arguments; return the exit code."""
    return fit_command(args, prepare=prepare, description=_description, score="perplexity {:.2f}")


def _description(run: TrainingCLI) -> str:
    data, model = run.datamodule, run.model
    counts = ", ".join(
        f"{len(ids):,} for {part}" + f" ({data.num_unknown[part]:,} unknown)"
        for part, ids in data.parts.items()
    )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"data: {data.name}, {data.vocab_size:,} different tokens ({data.token_kind}); {counts}\n"
        f"model: {num_parameters:,} parameters, memory {model.hparams['memory']}; run: {run.out}"
    )


def _prepare_memory(run: TrainingCLI) -> None:
    """Measure the memory of a step, if it is bounded, on the run's device, in its precision."""
    data, trainer = run.datamodule, run.trainer
    longest = min(data.bptt + MAX_JITTER * data.jitter, data.num_train_steps)
    precision = trainer.precision_plugin
    precision.convert_module(run.model)
    with run.threads(), precision.forward_context():
        run.model.prepare_memory(data.batch_size, longest, trainer.strategy.root_device)


def _check_trainer(run: TrainingCLI) -> None:
    trainer: Any = run.trainer
    if trainer.gradient_clip_val:
        raise ValueError(
            f"`--trainer.gradient_clip_val` is {trainer.gradient_clip_val}, but gradients are "
            "clipped by `--model.clip` here. Give that."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"`--trainer.accumulate_grad_batches` is {trainer.accumulate_grad_batches}, but each "
            "window is a step here. Give a larger `--batch-size`, and `--memory` if it does not "
            "fit."
        )
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise ValueError(
            f"`--trainer.strategy` is a {type(trainer.strategy).__name__}, which was not tried with"
            " this recipe. Give ddp, or one device."
        )
    if trainer.precision in ("16-mixed", "16-true"):
        raise ValueError(
            f"`--trainer.precision` is {trainer.precision}, in which gradients of means over a "
            "window are too small without a scale of the loss; that was not tried with this "
            "recipe. Give bf16-mixed."
        )
    if trainer.precision == "bf16-true" and run.model.hparams["averaging"] != "never":
        raise ValueError(
            "`--trainer.precision` is bf16-true, in which an average over hundreds of steps stands "
            "still. Give bf16-mixed, or `--model.averaging never`."
        )
    if run.config.trainer.reload_dataloaders_every_n_epochs != 1:
        raise ValueError(
            "`--trainer.reload_dataloaders_every_n_epochs` is "
            f"{run.config.trainer.reload_dataloaders_every_n_epochs}, but each epoch has windows "
            "of its own here. Leave it out."
        )


def _check_same_vocabulary(run: TrainingCLI, checkpoint: Checkpoint) -> None:
    if load_vocabulary(checkpoint).tokens != run.datamodule.vocabulary.tokens:
        raise ValueError(
            f"`{checkpoint.option}` is {checkpoint.path}, which was trained on a text with other "
            f"tokens than {run.datamodule.name}. Give the text that it was trained on by `--data`."
        )
