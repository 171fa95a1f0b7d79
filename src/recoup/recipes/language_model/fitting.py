"""Training a language model from Python, by the code of the command ``recoup lm fit``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch import Tensor

from recoup.memory import format_bytes
from recoup.recipes.language_model.network import LanguageModel

__all__ = ["Fitted", "fit"]

# What trains is imported where it is called: Lightning takes seconds, and may not be installed.


@dataclass(frozen=True, slots=True)
class Fitted:
    """The result of training a language model.

    Attributes:
        perplexity: Perplexity of the test part, with the weights that were best in validation; None
            if the part is too short to test.
        validation_perplexity: The same of the validation part.
        epochs: Number of epochs that were trained.
        seconds: Seconds of training and validation.
        peak_bytes: Peak of a training step, beyond what was allocated before it.
        results: Everything that ``run.json`` of a run by the command has, by name.

    Example:
        >>> from recoup.recipes.language_model import Fitted
        >>> print(Fitted(52.1, 50.2, 5, 12.3, 3 << 20, {}))
        perplexity 52.10 in test, after 5 epochs in 12.3 s, a step in 3 MiB
    """

    perplexity: float | None
    validation_perplexity: float | None
    epochs: int
    seconds: float
    peak_bytes: int
    results: Mapping[str, Any]

    def __str__(self) -> str:
        score = self.perplexity
        return (
            f"{'not tested' if score is None else f'perplexity {score:.2f} in test'}, after "
            f"{self.epochs} epochs in {self.seconds:.1f} s, a step in "
            f"{format_bytes(self.peak_bytes)}"
        )


def fit(
    network: LanguageModel,
    tokens: Tensor,
    *,
    memory: str = "linear",
    epochs: int = 30,
    batch_size: int = 20,
    bptt: int = 70,
    learning_rate: float = 30.0,
    validation: float | Tensor = 0.1,
    test: float | Tensor = 0.1,
    patience: int = 20,
    seed: int = 0,
    out: str | PathLike[str] | None = None,
    progress: bool = True,
    trainer: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Fitted:
    """Train a language model on a text, as ``recoup lm fit`` does.

    It is the same code: windows through time, Lightning's Trainer runs the loop, and all draws
    follow from `seed`. The network is trained in place. It is left in evaluation mode with the
    weights that were best in validation. What a step keeps is as `memory` says; a copy of the
    weights is on disk during the call. The random stream of the caller goes on as if there had been
    no call.

    Args:
        network: The language model.
        tokens: The text as numbers of tokens ``(T,)``, below the size of the vocabulary.
        memory: "linear" keeps all of a window, "sqrt" the states between segments, and bytes, such
            as ``"1 GiB"``, bound a step; both run each segment but the last once more.
        epochs: The most epochs.
        batch_size: Number of columns of text that are read side by side.
        bptt: Number of steps of a window; windows vary around it.
        learning_rate: The learning rate of a window of `bptt` steps.
        validation: Part of the text that validates each epoch, above 0 and below 1; or a text of
            its own ``(T,)``.
        test: Part of the text kept for the end; or a text of its own.
        patience: Number of epochs without a better validation after which training ends.
        seed: Seed of the lengths of windows and of the draws of all steps.
        out: A new folder for checkpoints, ``metrics.csv`` and ``run.json``; nothing is left on disk
            if None.
        progress: Whether to show a bar and a line for each epoch on stderr.
        trainer: Further arguments of Lightning's Trainer, such as ``{"accelerator": "cpu"}``.
        settings: ``optimizer`` ("sgd", "adam"), ``weight_decay`` (1.2e-6), ``clip`` (0.25),
            ``averaging`` ("triggered", "always", "never"), ``activation_penalty`` (2.0),
            ``temporal_penalty`` (1.0), ``weight_noise_start`` and ``num_patient``, as for the
            command; ``eval_batch_size`` (10), the columns of validation and test.

    Returns:
        Perplexity, epochs, seconds and peak bytes, printable.

    Raises:
        ImportError: When the packages of recipes are not installed.
        TypeError: When there is no argument of a name.
        ValueError: When an argument does not fit, or no segments keep to the bytes.
        KeyboardInterrupt: When it is interrupted, after the current step. The weights are then
            those of that step.

    Example:
        >>> import torch
        >>> from recoup.recipes.language_model import LanguageModel, fit
        >>> network = LanguageModel(9, embed_size=8, hidden_size=16, num_layers=1)
        >>> tokens = torch.arange(3000) % 9
        >>> fitted = fit(network, tokens, memory="sqrt", epochs=2, learning_rate=10, progress=False)
        >>> fitted.epochs, network.training
        (2, False)
    """
    recipe = _recipe()
    results = recipe.train_given(
        network,
        tokens,
        memory=memory,
        validation=validation,
        test=test,
        epochs=epochs,
        patience=patience,
        batch_size=batch_size,
        bptt=bptt,
        seed=seed,
        out=out,
        progress=progress,
        trainer=trainer,
        learning_rate=learning_rate,
        **settings,
    )
    return Fitted(
        perplexity=results.get("test_perplexity"),
        validation_perplexity=results["best_validation_perplexity"],
        epochs=results["num_epochs"],
        seconds=results["seconds"],
        peak_bytes=results["step"]["peak_bytes"],
        results=results,
    )


def _recipe() -> Any:
    try:
        from recoup.recipes.language_model import given
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "recoup":
            raise
        raise ImportError(
            f"`fit` needs {error.name.partition('.')[0]}, which is not installed. Install what "
            'training needs: pip install "recoup[recipes]"'
        ) from error
    return given
