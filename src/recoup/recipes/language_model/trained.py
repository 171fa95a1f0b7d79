"""A trained language model, its vocabulary and its text, from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from recoup.recipes.checkpoints import (
    check_same_network,
    damage_reported,
    data_path_in,
    read_checkpoint,
    settings_in,
)
from recoup.recipes.language_model.data import Texts
from recoup.recipes.language_model.model import LanguageModelTraining
from recoup.recipes.language_model.reading import TokenKind
from recoup.recipes.language_model.vocabulary import Vocabulary

__all__ = ["load_data", "load_model", "load_path", "load_vocabulary", "vocabulary_in"]


def load_model(path: str | Path) -> LanguageModelTraining:
    """Return the language model of a checkpoint, ready for evaluation on CPU.

    Raises:
        ValueError: When the file is not a checkpoint of this recipe.
    """
    checkpoint = read_checkpoint(path, "--checkpoint")
    vocabulary = vocabulary_in(checkpoint, path)
    with damage_reported(path, "a language model"):
        model = LanguageModelTraining(**settings_in(checkpoint, "hyper_parameters"))
        check_same_network(checkpoint, model, str(path))
        model.load_state_dict(checkpoint["state_dict"])
    if model.hparams["vocab_size"] != len(vocabulary):
        raise ValueError(
            f"{path} is damaged: its model knows {model.hparams['vocab_size']} tokens, but its "
            f"vocabulary has {len(vocabulary)}. Give another checkpoint."
        )
    return model.eval()


def load_vocabulary(path: str | Path) -> tuple[Vocabulary, TokenKind]:
    """Return the vocabulary of a checkpoint, and the kind of its tokens."""
    checkpoint = read_checkpoint(path, "--checkpoint")
    return vocabulary_in(checkpoint, path), _token_kind_in(checkpoint, path)


def load_data(path: str | Path, data: str | None = None, **settings: Any) -> Texts:
    """Return the text that a model was trained on, or another, in the vocabulary of the model.

    Args:
        path: The checkpoint.
        data: A text file or a folder; None for the training text.
        settings: Other settings of `Texts` to change.

    Raises:
        ValueError: When the text cannot be read.
    """
    checkpoint = read_checkpoint(path, "--checkpoint")
    vocabulary = vocabulary_in(checkpoint, path)
    found = settings_in(checkpoint, "datamodule_hyper_parameters") | settings
    found["tokens"] = _token_kind_in(checkpoint, path)
    with damage_reported(path, "a language model"):
        trained_on = data_path_in(checkpoint, Texts.__qualname__)
    if data is None and trained_on is not None and not Path(trained_on).exists():
        raise ValueError(
            f"{path} is of a model that was trained on {trained_on}, which is not there. Say where "
            "it is, or give another text, by `--data`."
        )
    found["path"] = trained_on if data is None else data
    with damage_reported(path, "a language model"):
        return Texts(**found, vocabulary=list(vocabulary.tokens))


def load_path(path: str | Path) -> str | None:
    """Return the path of the text on which the model of a checkpoint was trained."""
    with damage_reported(path, "a language model"):
        return data_path_in(read_checkpoint(path, "--checkpoint"), Texts.__qualname__)


def vocabulary_in(checkpoint: dict[str, Any], path: str | Path) -> Vocabulary:
    """Return the vocabulary of a loaded checkpoint.

    Raises:
        ValueError: When it is a checkpoint of another recipe.
    """
    found = checkpoint.get(Texts.__qualname__)
    if not isinstance(found, dict) or "vocabulary" not in found:
        raise ValueError(
            f"{path} is not a checkpoint of a language model. Give one that `recoup lm fit` wrote."
        )
    tokens: Any = found["vocabulary"]
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"{path} is damaged: its vocabulary is no list of tokens. Give another.")
    return Vocabulary(tokens)


def _token_kind_in(checkpoint: dict[str, Any], path: str | Path) -> TokenKind:
    """Return the kind of the tokens of a checkpoint whose vocabulary was checked."""
    kind: Any = checkpoint[Texts.__qualname__].get("tokens")
    if kind not in get_args(TokenKind):
        raise ValueError(f"{path} is damaged: its tokens are of no known kind. Give another.")
    return kind
