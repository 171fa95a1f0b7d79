"""Training a flow from Python.

NOTE [ The recipe trains ]

Rule 1. The recipe of flows has the only training code, and it stands on this room, which needs
        torch alone. So it is looked up by name when `fit` is called, and never imported before.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch import Tensor

from recoup.flows.flow import Flow
from recoup.memory import format_bytes
from recoup.schedules.memory import Memory

__all__ = ["Fitted", "fit"]

Data = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Fitted:
    """The result of training a flow.

    Attributes:
        bits_per_dim: Bits per dimension of the test part, with the weights that were best in
            validation; None if no sample was left to test.
        validation_bits_per_dim: The same of the validation part.
        epochs: Number of epochs that were trained.
        seconds: Seconds of training and validation.
        peak_bytes: Peak of a training step, beyond what was allocated before it.
        results: Everything that ``run.json`` of a run by the command has, by name.

    Example:
        >>> from recoup.flows import Fitted
        >>> print(Fitted(2.51, 2.5, 5, 12.3, 3 << 20, {}))
        2.510 bits/dim in test, after 5 epochs in 12.3 s, a step in 3 MiB
    """

    bits_per_dim: float | None
    validation_bits_per_dim: float | None
    epochs: int
    seconds: float
    peak_bytes: int
    results: Mapping[str, Any]

    def __str__(self) -> str:
        bits = self.bits_per_dim
        return (
            f"{'not tested' if bits is None else f'{bits:.3f} bits/dim in test'}, after "
            f"{self.epochs} epochs in {self.seconds:.1f} s, a step in "
            f"{format_bytes(self.peak_bytes)}"
        )


def fit(
    flow: Flow,
    images: Data,
    *,
    memory: Memory | None = None,
    epochs: int = 30,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    validation: float | Data = 0.1,
    test: float | Data = 0.1,
    patience: int = 20,
    seed: int = 0,
    out: str | PathLike[str] | None = None,
    progress: bool = True,
    trainer: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Fitted:
    """Train a flow on samples, as ``recoup flow fit`` does.

    It is the same code: the loss is `Flow.bits_per_dim`, Lightning's Trainer runs the loop, and all
    draws follow from `seed`. The flow is trained in place. It is left in evaluation mode with the
    weights that were best in validation. What a step keeps, and what backward pays, is as
    `memory` says; a copy of the weights is on disk during the call. The random stream of the
    caller goes on as if there had been no call.

    Args:
        flow: The flow.
        images: Samples ``(N, *shape)``, whole grey levels if the flow has `levels`; a pair of
            samples and labels ``(N,)`` for a conditional flow. All are held in CPU memory.
        memory: Memory mode to set, as for `Chain`: ``"constant"``, ``"1 GiB"``; as it is if None.
        epochs: The most epochs.
        batch_size: Number of samples in a batch.
        learning_rate: The learning rate after the warm-up.
        validation: Part of the samples that validates each epoch, above 0 and below 1; or samples
            of their own, in the form of `images`.
        test: Part of the samples kept for the end; or samples of their own.
        patience: Number of epochs without a better validation after which training ends.
        seed: Seed of the order of samples and of the draws of all steps.
        out: A new folder for checkpoints, ``metrics.csv`` and ``run.json``; nothing is left on disk
            if None.
        progress: Whether to show a bar and a line for each epoch on stderr.
        trainer: Further arguments of Lightning's Trainer, such as ``{"accelerator": "cpu"}``.
        settings: ``optimizer`` ("adam", "adamax"), ``num_warmup_steps`` (50) and
            ``num_decay_steps``, as for the command.

    Returns:
        Bits per dimension, epochs, seconds and peak bytes, printable.

    Raises:
        ImportError: When the packages of recipes are not installed.
        TypeError: When there is no argument of a name.
        ValueError: When an argument does not fit.
        BudgetError: When no plan keeps to the bytes given as `memory`.
        KeyboardInterrupt: When it is interrupted, after the current step. The weights are then
            those of that step.

    Example:
        >>> import torch
        >>> from recoup.flows import RealNVP, fit
        >>> points = torch.randn(400, 2) @ torch.tensor([[1.0, 0.9], [0.0, 0.3]])
        >>> flow = RealNVP((2,), levels=None, num_steps=2, width=8)
        >>> fitted = fit(flow, points, memory="constant", epochs=2, progress=False)
        >>> fitted.epochs, flow.memory, flow.sample(3).shape
        (2, 'constant', torch.Size([3, 2]))
    """
    results = _recipe().train_given(
        flow,
        images,
        memory=memory,
        validation=validation,
        test=test,
        epochs=epochs,
        patience=patience,
        batch_size=batch_size,
        seed=seed,
        out=out,
        progress=progress,
        trainer=trainer,
        learning_rate=learning_rate,
        **settings,
    )
    return Fitted(
        bits_per_dim=results.get("test_bits_per_dim"),
        validation_bits_per_dim=results["best_validation_bits_per_dim"],
        epochs=results["num_epochs"],
        seconds=results["seconds"],
        peak_bytes=results["step"]["peak_bytes"],
        results=results,
    )


def _recipe() -> Any:
    """Import the recipe (See Rule 1), which takes seconds."""
    try:
        return importlib.import_module("recoup.recipes.flow.given")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "recoup":
            raise
        raise ImportError(
            f"`recoup.flows.fit` needs {error.name.partition('.')[0]}, which is not installed. "
            'Install what training needs: pip install "recoup[recipes]"'
        ) from error
