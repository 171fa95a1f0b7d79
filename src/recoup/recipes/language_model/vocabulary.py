"""The vocabulary: the mapping from tokens to numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["UNKNOWN", "Vocabulary"]

UNKNOWN = "<unk>"


class Vocabulary:
    """The tokens that a model knows; all others are ``<unk>``, which is one of them.

    Args:
        tokens: the tokens, each once; the index of each is its number.

    Raises:
        ValueError: when ``<unk>`` is not among the tokens, or a token occurs twice.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tuple(tokens)
        self._numbers = {token: number for number, token in enumerate(self.tokens)}
        if UNKNOWN not in self._numbers or len(self._numbers) != len(self.tokens):
            raise ValueError(
                f"`tokens` are {len(self.tokens)}, {len(self._numbers)} of them different, but "
                f"must all be different, and {UNKNOWN} one of them."
            )
        self.unknown = self._numbers[UNKNOWN]

    @classmethod
    def of(
        cls, tokens: Iterable[str], min_count: int = 1, max_size: int | None = None
    ) -> Vocabulary:
        """Return the vocabulary of a text, the most frequent tokens first.

        Args:
            tokens: the text.
            min_count: how often a token must occur.
            max_size: the largest number of tokens, ``<unk>`` included; None for any.

        Example:
            >>> Vocabulary.of("a rose is a rose".split(), min_count=2).tokens
            ('a', 'rose', '<unk>')
        """
        counts = Counter(tokens)
        known = [
            token
            for token, count in counts.most_common()
            if count >= min_count and token != UNKNOWN
        ]
        known = known if max_size is None else known[: max_size - 1]
        # It counts the tokens that are left out, and those that are ``<unk>`` in the text itself.
        left_out = counts.total() - sum(counts[token] for token in known)
        rank = sum(counts[token] >= left_out for token in known)
        return cls([*known[:rank], UNKNOWN, *known[rank:]])

    def __len__(self) -> int:
        return len(self.tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._numbers

    def encode(self, tokens: Iterable[str]) -> Tensor:
        """Return the numbers of tokens ``(T,)``, int64."""
        numbers, unknown = self._numbers, self.unknown
        return torch.tensor([numbers.get(token, unknown) for token in tokens], dtype=torch.int64)

    def num_unknown(self, tokens: Iterable[str]) -> int:
        """Return the number of tokens that are not in the vocabulary."""
        return sum(token not in self._numbers for token in tokens)
