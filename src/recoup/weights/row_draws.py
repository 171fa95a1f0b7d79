"""Dropped and noisy rows of a table, computed from a seed and the numbers of the rows.

NOTE [ A draw that is addressed by row ]

Rule 1. The weight of an embedding is drawn here, and not in `draws.py`, whose generators draw a
        weight from its first entry on. An entry depends on the seed, on its row and column, and on
        the number of columns alone. So the rows of a batch have the numbers that the whole table
        has, wherever else it is read, and nothing is drawn for the other rows.
Rule 2. The words of a row have numbers of their own, row * words_per_row + word, and are those
        numbers' outputs of SplitMix64, which starts at a hash of the seed. Operators compute it in
        int64, where products wrap around. Shifts are arithmetic there, so the bits that they copy
        are cleared.
Rule 3. A mask is made of words as in Rule 2 of `draws`: the same lanes, the same rounding of p.
Rule 4. A word makes two normals, by the inverse of the normal distribution in float64, which torch
        computes for each entry by itself: so the numbers do not depend on the number of rows, the
        threads or the vectors of a machine. Other devices may round them in another way.
Rule 5. A piece is small, so that operators start no threads on a CPU: each of a thousand would wait
        for the slowest of them.
Rule 6. A mask that is shared along the rows is that of row 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from recoup._core.rng import hash_seed
from recoup.weights import draws


def dropped(
    weight: Tensor,
    seed: int,
    p: float,
    rows: Tensor | None = None,
    *,
    axes: tuple[int, ...] = (),
    in_place: bool = False,
) -> Tensor:
    """Return rows of a table with entries dropped and the others scaled.

    Args:
        weight: the rows, a matrix of any floating-point type.
        seed: from 0 to 2**63 - 1; the same seed drops the same entries of a row.
        p: share of entries that is dropped, rounded as by `draws.dropped`.
        rows: the number of each row in the table, of any integer type; None if it is the table.
        axes: along which entries are dropped together: 0 and 1.
        in_place: whether to write to `weight`.

    Returns:
        `weight`, or a contiguous tensor of its shape, dtype and device; all zeros if p is 1.
    """
    rate, width = draws.rate_of(p, weight.dtype), 1 if 1 in axes else weight.shape[1]
    if 0 in axes:  # See Rule 6
        rows = torch.zeros(weight.shape[0], dtype=torch.int64, device=weight.device)

    def draw(numbers: Tensor) -> Tensor:
        return _scales(numbers, width, seed, rate, weight.dtype)

    return _written(weight, rows, width, draw, torch.mul, in_place)


def noised(
    weight: Tensor, seed: int, std: float, rows: Tensor | None = None, *, in_place: bool = False
) -> Tensor:
    """Return rows of a table with Gaussian noise added.

    Noise is rounded to the dtype of `weight` before it is added.

    Args:
        weight: the rows, as for `dropped`.
        seed: from 0 to 2**63 - 1.
        std: standard deviation of the noise, in the unit of `weight`.
        rows: as for `dropped`.
        in_place: whether to write to `weight`.

    Returns:
        `weight`, or a contiguous tensor of its shape, dtype and device.
    """
    width = weight.shape[1]

    def draw(numbers: Tensor) -> Tensor:
        return _normals(numbers, width, seed).mul_(std).to(weight.dtype)

    return _written(weight, rows, width, draw, torch.add, in_place)


def _written(
    weight: Tensor,
    rows: Tensor | None,
    width: int,
    draw: Callable[[Tensor], Tensor],
    combine: Callable[..., Tensor],
    in_place: bool,
) -> Tensor:
    """Return `combine(weight, draw)`, of each of whose rows `width` numbers are drawn."""
    out = weight if in_place else torch.empty_like(weight, memory_format=torch.contiguous_format)
    numbers = torch.arange(weight.shape[0], device=weight.device) if rows is None else rows.long()
    step = max(1, draws.piece_for(weight.device) // max(1, width))
    for start in range(0, weight.shape[0], step):
        place = slice(start, start + step)
        combine(weight[place], draw(numbers[place]), out=out[place])
    return out


def _scales(rows: Tensor, width: int, seed: int, rate: draws.Rate, dtype: torch.dtype) -> Tensor:
    """Return the entries of a mask in some rows (See Rule 3)."""
    lanes = _words(rows, -(-width // rate.num_lanes), seed).view(rate.lanes)[:, :width]
    kept = torch.empty(lanes.shape, dtype=dtype, device=rows.device)
    return torch.ge(lanes, rate.constants[0], out=kept).mul_(rate.scale)


def _normals(rows: Tensor, width: int, seed: int) -> Tensor:
    """Return the entries of Gaussian noise in some rows, in float64 (See Rule 4)."""
    words = _words(rows, -(-width // 2), seed).view(torch.int32)[:, :width]
    inverse: Callable[[Tensor], Tensor] = cast("Any", torch.special).ndtri
    return inverse(words.to(torch.float64).add_(2**31 + 0.5).mul_(2.0**-32))


# --- SplitMix64 (See Rule 2) ---------------------------------------------------------------------


def _signed(word: int) -> int:
    """Return a word of 64 bits as int64 has it."""
    return word - 2**64 if word >= 2**63 else word


_STEP = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def _words(rows: Tensor, num_words: int, seed: int) -> Tensor:
    """Return the random words of some rows, a row each."""
    words = rows.unsqueeze(1) * num_words + torch.arange(num_words, device=rows.device)
    words.mul_(_STEP).add_(_signed(hash_seed(seed)))
    shifted = torch.empty_like(words)
    for distance, factor in _ROUNDS:
        torch.bitwise_right_shift(words, distance, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_(2 ** (64 - distance) - 1))
        if factor != 1:
            words.mul_(factor)
    return words
