"""A text as consecutive windows, through which the state of the model is carried."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recoup.recipes.draws import seed_at

__all__ = ["MAX_JITTER", "MIN_LENGTH", "Windows", "columns_of", "jittered_lengths"]

# As in Merity et al.: half the length in one window of twenty, a standard deviation of five steps,
# and no window shorter than five. None is longer by more than five deviations, as one in three
# million would be, so that a bound on memory holds for all.
_HALF_FRACTION = 0.05
_DEVIATION = 5.0
MIN_LENGTH = 5
MAX_JITTER = 25


def columns_of(ids: Tensor, batch_size: int) -> Tensor:
    """Lay a text out in columns that are read side by side.

    Args:
        ids: numbers of tokens ``(T,)``.
        batch_size: number of columns N.

    Returns:
        ``(T // N, N)``; tokens that do not fill a row are left out.
    """
    num_rows = len(ids) // batch_size
    return ids[: num_rows * batch_size].view(batch_size, num_rows).t().contiguous()


def jittered_lengths(num_steps: int, bptt: int, seed: int, epoch: int) -> list[int]:
    """Return the lengths of windows that cover `num_steps`, about `bptt` each.

    Since windows begin elsewhere in each epoch, each token is near the end of one at times.

    Args:
        num_steps: number of steps to cover.
        bptt: mean length of most windows.
        seed: seed of the run.
        epoch: number of the epoch; each has lengths of its own.

    Source: Merity, Keskar and Socher, https://arxiv.org/abs/1708.02182, section 5.
    """
    generator = torch.Generator().manual_seed(seed_at(seed, "lengths", epoch))
    lengths: list[int] = []
    while num_steps > 0:
        is_half = float(torch.rand((), generator=generator)) < _HALF_FRACTION
        centre = bptt / 2 if is_half else float(bptt)
        drawn = centre + _DEVIATION * float(torch.randn((), generator=generator))
        length = min(max(MIN_LENGTH, int(drawn)), bptt + MAX_JITTER, num_steps)
        lengths.append(length)
        num_steps -= length
    return lengths


class Windows:
    """The windows of a text in columns, in order: ``(length + 1, N)``, each with its targets.

    Args:
        columns: numbers of tokens ``(T, N)``.
        lengths: number of steps of each window; they add up to T - 1.
    """

    def __init__(self, columns: Tensor, lengths: list[int]) -> None:
        self.columns = columns
        self.lengths = lengths

    @classmethod
    def even(cls, columns: Tensor, bptt: int) -> Windows:
        """Return windows of equal lengths, except the last."""
        num_steps = len(columns) - 1
        return cls(columns, [min(bptt, num_steps - at) for at in range(0, num_steps, bptt)])

    @property
    def num_tokens(self) -> int:
        """Number of tokens to predict."""
        return sum(self.lengths) * self.columns.shape[1]

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Tensor]:
        start = 0
        for length in self.lengths:
            yield self.columns[start : start + length + 1]
            start += length
