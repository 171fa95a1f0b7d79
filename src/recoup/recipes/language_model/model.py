"""The training of a language model that is built from settings."""

from __future__ import annotations

import inspect
from typing import Literal

from recoup.recipes.language_model.averaging import AveragingKind
from recoup.recipes.language_model.network import DropoutKind, LanguageModel
from recoup.recipes.language_model.steps import LanguageModelSteps

__all__ = ["LanguageModelTraining"]


class LanguageModelTraining(LanguageModelSteps):
    """Train an AWD-LSTM on text, through time in a memory of your choice.

    Logged for each epoch, for training (``train_``) and validation (``val_``), and for ``test_``:
    `perplexity`, from sums over tokens and without the penalties; `averaged`, the number of steps
    over which the validated parameters are averaged.

    All randomness of a step (masks, weight dropout, noise) follows from `seed`, the epoch and the
    number of the window: a resumed run draws what the uninterrupted one would have drawn.

    Args:
        vocab_size: Number of tokens.
        bptt: Length of a window at which the learning rate is as given; it is scaled by the length.
        embed_size: Size of an embedding.
        hidden_size: Size of the layers.
        num_layers: Number of LSTM layers.
        tie_weights: Whether the decoder has the weight of the embedding.
        input_dropout: Dropout of what the first layer is given.
        hidden_dropout: Dropout between layers.
        output_dropout: Dropout of what the decoder is given.
        embedding_dropout: Dropout of rows of the embedding.
        weight_dropout: Dropout of hidden-to-hidden weights.
        dropout_kind: "locked" for one mask for a window, "independent" for another at each step.
        weight_noise: Standard deviation of variational noise on weights.
        weight_noise_start: Number of the step from which there is noise.
        activation_penalty: Weight of the mean square of the outputs (AR).
        temporal_penalty: Weight of the mean square of their differences in time (TAR).
        optimizer: The optimizer.
        learning_rate: The learning rate.
        weight_decay: The weight decay.
        clip: Largest norm of the gradient; 0 for no bound.
        averaging: Whether the parameters are averaged: "triggered" when validation no longer
            improves (NT-ASGD), "always" from the first step on, until validation no longer improves
            (finetuning), or "never".
        num_patient: How many of the last validations the trigger does not count.
        memory: What backward remembers of a window: "linear" for all of it, "sqrt" for as many
            states as a segment has steps, or the most bytes that a step may take, as "500 MiB".
        seed: Seed of the draws of all steps.
    """

    def __init__(
        self,
        vocab_size: int,
        bptt: int = 70,
        embed_size: int = 400,
        hidden_size: int = 1150,
        num_layers: int = 3,
        tie_weights: bool = True,
        input_dropout: float = 0.65,
        hidden_dropout: float = 0.2,
        output_dropout: float = 0.4,
        embedding_dropout: float = 0.1,
        weight_dropout: float = 0.5,
        dropout_kind: DropoutKind = "locked",
        weight_noise: float = 0.0,
        weight_noise_start: int = 0,
        activation_penalty: float = 2.0,
        temporal_penalty: float = 1.0,
        optimizer: Literal["sgd", "adam"] = "sgd",
        learning_rate: float = 30.0,
        weight_decay: float = 1.2e-6,
        clip: float = 0.25,
        averaging: AveragingKind = "triggered",
        num_patient: int = 5,
        memory: str = "linear",
        seed: int = 0,
    ) -> None:
        given = dict(locals())
        names = inspect.signature(LanguageModel).parameters
        super().__init__(
            LanguageModel(**{name: given[name] for name in names}),
            bptt,
            weight_noise_start,
            activation_penalty,
            temporal_penalty,
            optimizer,
            learning_rate,
            weight_decay,
            clip,
            averaging,
            num_patient,
            memory,
            seed,
        )
        self.save_hyperparameters()
