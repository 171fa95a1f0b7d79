"""Training text: Python's documentation, a file, or a folder; split and numbered."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from recoup.recipes.checkpoints import full_path
from recoup.recipes.checks import check_at_least
from recoup.recipes.language_model.reading import Text, TokenKind, read_text, tokens_of
from recoup.recipes.language_model.vocabulary import Vocabulary
from recoup.recipes.language_model.windows import (
    MAX_JITTER,
    MIN_LENGTH,
    Windows,
    columns_of,
    jittered_lengths,
)

__all__ = ["Texts", "TokenWindows"]


class TokenWindows(LightningDataModule):
    """Numbered tokens in training, validation and test parts, as windows ``(length + 1, N)``.

    All of them are held in memory, 8 bytes a token. The windows of an epoch depend on `seed` and
    the number of the epoch alone, so that a resumed run continues as if it had not been
    interrupted.

    Args:
        name: Name of the text in messages.
        parts: The tokens ``(T,)`` of "train", "validation" and "test", int64.
        batch_size: Number of columns that are read side by side in training.
        eval_batch_size: The same in validation and test.
        bptt: Number of steps of a window.
        jitter: Whether the windows of training vary around `bptt`, anew in each epoch.
        seed: Seed of the lengths of windows.
    """

    def __init__(
        self,
        name: str,
        parts: dict[str, Tensor],
        *,
        batch_size: int = 20,
        eval_batch_size: int = 10,
        bptt: int = 70,
        jitter: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size, bptt=bptt)
        if jitter and bptt < 2 * MIN_LENGTH:
            raise ValueError(
                f"`bptt` is {bptt}, but windows of at least {MIN_LENGTH} steps vary around no less "
                f"than {2 * MIN_LENGTH}. Give that, or turn `jitter` off."
            )
        self.name = name
        self.parts = parts
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.bptt = bptt
        self.jitter = jitter
        self.seed = seed

    @property
    def num_train_steps(self) -> int:
        """Number of time steps of an epoch."""
        return len(self._columns("train", self.batch_size)) - 1

    @property
    def longest(self) -> int:
        """Number of steps of the longest window of training."""
        return min(self.bptt + MAX_JITTER * self.jitter, self.num_train_steps)

    @property
    def can_test(self) -> bool:
        """Whether the test part fills two rows of columns."""
        return len(self.parts["test"]) >= 2 * self.eval_batch_size

    def first_window(self) -> Tensor:
        """Return the first `bptt` steps of training ``(bptt + 1, N)``, or as many as there are."""
        return self._columns("train", self.batch_size)[: self.bptt + 1]

    def train_dataloader(self) -> Windows:
        """Return windows of the training part, with lengths set by `seed` and the epoch."""
        num_ranks, rank, epoch = 1, 0, 0
        if self.trainer is not None:
            num_ranks, rank = self.trainer.world_size, self.trainer.global_rank
            epoch = self.trainer.current_epoch
        columns = self._columns("train", self.batch_size * num_ranks)
        columns = columns[:, rank * self.batch_size :][:, : self.batch_size]
        if not self.jitter:
            return Windows.even(columns, self.bptt)
        return Windows(columns, jittered_lengths(len(columns) - 1, self.bptt, self.seed, epoch))

    def val_dataloader(self) -> Windows:
        """Return windows of the validation part."""
        return Windows.even(self._columns("validation", self.eval_batch_size), self.bptt)

    def test_dataloader(self) -> Windows:
        """Return windows of the test part."""
        return Windows.even(self._columns("test", self.eval_batch_size), self.bptt)

    def _columns(self, part: str, batch_size: int) -> Tensor:
        columns = columns_of(self.parts[part], batch_size)
        if len(columns) < 2:
            raise ValueError(
                f"The {part} part of {self.name} has {len(self.parts[part])} tokens, too few for "
                f"{batch_size} columns of two. Give more text, or a smaller batch size."
            )
        return columns


class Texts(TokenWindows):
    """Text in training, validation and test parts, as windows ``(length + 1, N)`` of tokens.

    All of it is held in memory, 8 bytes a token. The vocabulary is that of the training part. The
    windows of an epoch depend on `seed` and the number of the epoch alone, so that a resumed run
    continues as if it had not been interrupted.

    Args:
        path: A text file, or a folder with train.txt, valid.txt and test.txt; the documentation
            that comes with CPython if None.
        tokens: What a token is: "whitespace" for what stands between white space, as in texts
            that were tokenized before; "words" for words and marks of punctuation; "characters".
            "words" for the built-in text and "whitespace" for others if None.
        min_count: How often a token must occur in training to be in the vocabulary; all others
            are <unk>.
        max_vocab_size: The largest size of the vocabulary.
        batch_size: Number of columns that are read side by side in training.
        eval_batch_size: The same in validation and test.
        bptt: Number of steps of a window.
        jitter: Whether the windows of training vary around `bptt`, anew in each epoch; the learning
            rate of a window is scaled by its length.
        validation_fraction: Part of the text that validates, if there is no validation file.
        test_fraction: Part of the text kept for the end, if there is no test file.
        seed: Seed of the lengths of windows.
        vocabulary: The tokens of a vocabulary to use, in the order of their numbers.
    """

    def __init__(
        self,
        path: str | None = None,
        tokens: TokenKind | None = None,
        min_count: int = 2,
        max_vocab_size: int | None = None,
        batch_size: int = 20,
        eval_batch_size: int = 10,
        bptt: int = 70,
        jitter: bool = True,
        validation_fraction: float = 0.1,
        test_fraction: float = 0.1,
        seed: int = 0,
        vocabulary: list[str] | None = None,
    ) -> None:
        check_at_least(1, min_count=min_count)
        check_at_least(2, max_vocab_size=max_vocab_size)
        if not (0 < validation_fraction < 1 and 0 < test_fraction < 1):
            raise ValueError(
                f"`validation_fraction` is {validation_fraction} and `test_fraction` "
                f"{test_fraction}, but both must lie between 0 and 1. Try 0.1."
            )
        if tokens is not None and tokens not in get_args(TokenKind):
            raise ValueError(
                f'`tokens` is {tokens!r}, but must be "words", "whitespace" or "characters".'
            )
        text = read_text(None if path is None else Path(path))
        kind: TokenKind = tokens or ("words" if path is None else "whitespace")
        found = _split(text, kind, validation_fraction, test_fraction)
        known = _vocabulary(text, found, min_count, max_vocab_size, vocabulary)
        super().__init__(
            text.name,
            {part: known.encode(each) for part, each in found.items()},
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            bptt=bptt,
            jitter=jitter,
            seed=seed,
        )
        self.save_hyperparameters(ignore=["vocabulary"])
        self.path = path
        self.token_kind: TokenKind = kind
        self.vocabulary = known
        self.num_unknown = {part: known.num_unknown(each) for part, each in found.items()}
        self.has_test_part = "test" in text.parts
        self._parts_with_files = text.parts.keys() - {"train"}

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return len(self.vocabulary)

    def test_on_everything(self) -> None:
        """Make the whole text the test part, for a text unseen in training."""
        # In the order of the text: parts without a file were cut from the end of training.
        order = sorted(("train", "validation", "test"), key=self._parts_with_files.__contains__)
        self.parts["test"] = torch.cat([self.parts[part] for part in order])
        self.num_unknown["test"] = sum(self.num_unknown.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the text for a checkpoint: the vocabulary and the path."""
        return {
            "vocabulary": list(self.vocabulary.tokens),
            "tokens": self.token_kind,
            "path": full_path(self.path),
        }


def _vocabulary(
    text: Text,
    parts: dict[str, list[str]],
    min_count: int,
    max_size: int | None,
    given: list[str] | None,
) -> Vocabulary:
    """Return the given vocabulary, or that of the training part."""
    if given is not None:
        return Vocabulary(given)
    _check_parts(text, parts)
    vocabulary = Vocabulary.of(parts["train"], min_count, max_size)
    if len(vocabulary) < 2:
        raise ValueError(
            f"`min_count` is {min_count}, but no token of {text.name} occurs as often in "
            "training: all would be <unk>. Give a smaller one, or more text."
        )
    return vocabulary


def _split(
    text: Text, kind: TokenKind, validation_fraction: float, test_fraction: float
) -> dict[str, list[str]]:
    """Tokenise the parts, and cut those that have no file from the end of training."""
    parts = {part: tokens_of(content, kind) for part, content in text.parts.items()}
    rest = parts["train"]
    num_tokens = len(rest)
    for part, fraction in (("test", test_fraction), ("validation", validation_fraction)):
        if part not in parts:
            start = max(0, len(rest) - round(fraction * num_tokens))
            parts[part], rest = rest[start:], rest[:start]
    parts["train"] = rest
    return parts


def _check_parts(text: Text, parts: dict[str, list[str]]) -> None:
    num_tokens = sum(len(tokens) for part, tokens in parts.items() if part not in text.parts)
    num_tokens += len(parts["train"])
    for part, tokens in parts.items():
        if not tokens:
            raise ValueError(
                f"{text.name} has {num_tokens} tokens, and none are left for {part}. Give "
                "more text, or other `--data.validation_fraction` and `--data.test_fraction`."
            )
