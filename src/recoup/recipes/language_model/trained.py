"""A trained language model, its vocabulary and its text, from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.language_model.data import Texts
from recoup.recipes.language_model.model import LanguageModelTraining
from recoup.recipes.language_model.reading import TokenKind
from recoup.recipes.language_model.vocabulary import Vocabulary

__all__ = ["load_data", "load_model", "load_token_kind", "load_vocabulary"]


def load_model(checkpoint: Checkpoint) -> LanguageModelTraining:
    """Return the language model of a checkpoint, ready for evaluation on CPU.

    Raises:
        ValueError: When the file is not a checkpoint of this recipe.
    """
    vocabulary = load_vocabulary(checkpoint)
    model = checkpoint.model(LanguageModelTraining, "a language model")
    if model.hparams["vocab_size"] != len(vocabulary):
        raise ValueError(
            f"{checkpoint.path} is damaged: its model knows {model.hparams['vocab_size']} tokens, "
            f"but its vocabulary has {len(vocabulary)}. Give another checkpoint."
        )
    return model


def load_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """Return the vocabulary of a checkpoint.

    Raises:
        ValueError: When it is a checkpoint of another recipe.
    """
    found = checkpoint.contents.get(Texts.__qualname__)
    if not isinstance(found, dict) or "vocabulary" not in found:
        raise ValueError(
            f"{checkpoint.path} is not a checkpoint of a language model. Give one that "
            "`recoup lm fit` wrote."
        )
    tokens: Any = found["vocabulary"]
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ValueError(
            f"{checkpoint.path} is damaged: its vocabulary is no list of tokens. Give another."
        )
    return Vocabulary(tokens)


def load_token_kind(checkpoint: Checkpoint) -> TokenKind:
    """Return the kind of the tokens of a checkpoint whose vocabulary was checked."""
    kind: Any = checkpoint.contents[Texts.__qualname__].get("tokens")
    if kind not in get_args(TokenKind):
        raise ValueError(
            f"{checkpoint.path} is damaged: its tokens are of no known kind. Give another."
        )
    return kind


def load_data(checkpoint: Checkpoint, data: str | None = None, **settings: Any) -> Texts:
    """Return the text that a model was trained on, or another, in the vocabulary of the model.

    Args:
        checkpoint: The checkpoint.
        data: A text file or a folder; None for the training text.
        settings: Other settings of `Texts` to change.

    Raises:
        ValueError: When the text cannot be read.
    """
    vocabulary = load_vocabulary(checkpoint)
    found = checkpoint.data_settings | settings
    found["tokens"] = load_token_kind(checkpoint)
    with checkpoint.damage_reported("a language model"):
        trained_on = checkpoint.data_path(Texts)
    if data is None and trained_on is not None and not Path(trained_on).exists():
        raise ValueError(
            f"{checkpoint.path} is of a model that was trained on {trained_on}, which does "
            "not exist here. Pass its path, or another text, as `--data`."
        )
    found["path"] = trained_on if data is None else data
    with checkpoint.damage_reported("a language model"):
        return Texts(**found, vocabulary=list(vocabulary.tokens))
