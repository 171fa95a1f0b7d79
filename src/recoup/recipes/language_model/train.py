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

from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.language_model.data import Texts
from recoup.recipes.language_model.model import LanguageModelTraining
from recoup.recipes.language_model.steps import MONITOR, TRAINER, measured_step
from recoup.recipes.language_model.supported import check_trainer, prepare_memory
from recoup.recipes.language_model.trained import load_vocabulary
from recoup.recipes.mistakes import mistakes_reported
from recoup.recipes.results import results_of
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
        trainer_defaults=TRAINER,
        finetuning={"averaging": "always"},
        args=args,
    )
    with mistakes_reported():
        check_trainer(run, "--trainer.")
        if run.checkpoint is not None:
            _check_same_vocabulary(run, run.checkpoint)
        run.datamodule.val_dataloader()  # raises if the part is too short
        prepare_memory(run)
    return run


def train(args: Sequence[str]) -> int:
    """Run ``recoup lm fit`` with these arguments; return the exit code."""
    return fit_command(
        args,
        prepare=prepare,
        description=_description,
        score="perplexity {:.2f}",
        results=_results,
    )


def _results(run: TrainingCLI) -> dict[str, Any] | None:
    return results_of(run, measured_step, memory=run.model.hparams["memory"])


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


def _check_same_vocabulary(run: TrainingCLI, checkpoint: Checkpoint) -> None:
    if load_vocabulary(checkpoint).tokens != run.datamodule.vocabulary.tokens:
        raise ValueError(
            f"`{checkpoint.option}` is {checkpoint.path}, which was trained on a text with other "
            f"tokens than {run.datamodule.name}. Give the text that it was trained on by `--data`."
        )
