"""Training a language model that is given as an object; `recoup.recipes.language_model.fit`."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from recoup.recipes.given_run import check_given, fitted
from recoup.recipes.language_model.data import TokenWindows
from recoup.recipes.language_model.network import LanguageModel
from recoup.recipes.language_model.steps import MONITOR, TRAINER, LanguageModelSteps, measured_step
from recoup.recipes.language_model.supported import check_trainer, prepare_memory
from recoup.recipes.training_run import TrainingRun

__all__ = ["train_given"]


def train_given(
    network: LanguageModel,
    tokens: Tensor,
    *,
    memory: str,
    validation: float | Tensor,
    test: float | Tensor,
    epochs: int,
    patience: int,
    batch_size: int,
    bptt: int,
    seed: int,
    out: str | PathLike[str] | None,
    progress: bool,
    trainer: Mapping[str, Any] | None,
    eval_batch_size: int = 10,
    **settings: Any,
) -> dict[str, Any]:
    """Train a language model, and return the results. `fit` explains the arguments."""
    check_given(LanguageModelSteps, train_given, seed=seed, trainer=trainer, settings=settings)
    if not isinstance(network, LanguageModel):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"`network` is of type {type(network).__name__}, but must be a LanguageModel."
        )
    windows = TokenWindows(
        "`tokens`",
        _parts(network, tokens, validation, test),
        batch_size=batch_size,
        eval_batch_size=eval_batch_size,
        bptt=bptt,
        seed=seed,
    )
    windows.val_dataloader()  # raises if the part is too short
    return fitted(
        LanguageModelSteps(network, bptt, memory=memory, seed=seed, **settings),
        windows,
        module=network,
        monitor=MONITOR,
        step=measured_step,
        epochs=epochs,
        patience=patience,
        out=out,
        progress=progress,
        trainer={**TRAINER, **(trainer or {})},
        memory=memory,
        check=_check,
    )


def _check(run: TrainingRun) -> None:
    check_trainer(run, "trainer.")
    prepare_memory(run)


def _parts(
    network: LanguageModel, tokens: Tensor, validation: float | Tensor, test: float | Tensor
) -> dict[str, Tensor]:
    """Return the parts of a text; those that are fractions are cut from its end, as for files."""
    parts: dict[str, Tensor] = {}
    rest = _checked(network, "tokens", tokens)
    num_tokens = len(rest)
    for name, part in (("test", test), ("validation", validation)):
        if not isinstance(part, Real):
            parts[name] = _checked(network, name, part)
            continue
        if not 0 < part < 1:
            raise ValueError(f"`{name}` is {part}, but must lie between 0 and 1. Try 0.1.")
        start = max(0, len(rest) - round(float(part) * num_tokens))
        parts[name], rest = rest[start:], rest[:start]
    return {"train": rest, "validation": parts["validation"], "test": parts["test"]}


def _checked(network: LanguageModel, name: str, ids: object) -> Tensor:
    """Return tokens on CPU; raise a ValueError unless they are numbers of the vocabulary."""
    if not isinstance(ids, Tensor):
        needed = "a tensor" if name == "tokens" else "a fraction or a tensor"
        raise ValueError(
            f"`{name}` is of type {type(ids).__name__}, but must be {needed}. torch.as_tensor "
            "makes a tensor."
        )
    size = network.decoder.weight.shape[0]
    is_whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool)
    if ids.ndim != 1 or not is_whole:
        raise ValueError(
            f"`{name}` has shape {tuple(ids.shape)} and type {ids.dtype}, but a text is numbers of "
            "tokens, whole and of shape (T,)."
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise ValueError(
            f"`{name}` holds {int(ids.min())} to {int(ids.max())}, but the vocabulary of the "
            f"network has {size} tokens, numbered from 0. Number the tokens anew, or build a "
            "larger network."
        )
    return ids.detach().cpu().long()
