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
Rule 4. A word makes two normals in float32 by Box and Muller's method: 31 bits for the radius,
        which is at most 6.6, one for the sign and 32 for the angle. Logarithm, sine and cosine are
        polynomials, of which every product and sum is rounded by itself, so that the numbers do not
        depend on the number of rows, the threads or the vectors of a machine. (MKL's logarithms
        start threads for 256 elements, and take many times as long on busy cores.) On other
        devices square roots may be rounded in another way, and masks are the same.
Rule 5. A piece is small, so that operators start no threads on a CPU: each of a thousand would wait
        for the slowest of them.
Rule 6. A mask that is shared along the rows is that of row 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from recoup._core.rng import hash_seed
from recoup.weights import draws

__all__ = ["dropped", "noised"]

# Coefficients from the lowest on, and the largest errors: of -2 ln(1.5 + x) for x from -0.5 to 0.5,
# and of sin(pi x) / x and cos(pi x), in x ** 2, for x from -0.5 to 0.5.
_LOG = (  # 4e-7
    *(-0.810930583, -1.33333233, 0.444490795, -0.197583503),
    *(0.0978580693, -0.051934659, 0.034828155, -0.0204876573),
)
_SIN = (3.14159264, -5.16771008, 2.55007752, -0.598291286, 0.0776576603)  # 1e-8
_COS = (0.999999953, -4.93479283, 4.05841135, -1.33187657, 0.219689611)  # 5e-8
_LN_2 = 0.6931471805599453


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

    Raises:
        ValueError: if `seed` or `p` is out of range, or `weight` has no floating-point numbers.
    """
    draws.check(weight.dtype, seed)
    out = weight if in_place else draws.empty_like(weight)
    num_dropped = draws.num_dropped_of(p)
    if num_dropped == 65536:
        return out.zero_()
    if num_dropped == 0:
        return out if in_place else out.copy_(weight)
    width = 1 if 1 in axes else weight.shape[1]
    if 0 in axes:  # See Rule 6
        row = torch.zeros(1, dtype=torch.int64, device=weight.device)
        return torch.mul(weight, _scales(row, width, seed, num_dropped, weight.dtype), out=out)
    for place, numbers in _pieces(weight, rows, width):
        mask = _scales(numbers, width, seed, num_dropped, weight.dtype)
        torch.mul(weight[place], mask, out=out[place])
    return out


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

    Raises:
        ValueError: if `seed` is out of range, or `weight` has no floating-point numbers.
    """
    draws.check(weight.dtype, seed)
    out = weight if in_place else draws.empty_like(weight)
    width, kind = weight.shape[1], torch.promote_types(weight.dtype, torch.float32)
    for place, numbers in _pieces(weight, rows, width):
        noise = _normals(numbers, width, seed).to(kind).mul_(std)
        torch.add(weight[place], noise.to(weight.dtype), out=out[place])
    return out


def _pieces(weight: Tensor, rows: Tensor | None, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows, of each of which `width` numbers are drawn, and the rows' numbers."""
    num_rows, device = weight.shape[0], weight.device
    step = max(1, draws.piece_for(device) // max(1, width))
    for start in range(0, num_rows, step):
        place = slice(start, min(start + step, num_rows))
        if rows is None:
            yield place, torch.arange(place.start, place.stop, device=device)
        else:
            yield place, rows[place].to(torch.int64)


def _scales(rows: Tensor, width: int, seed: int, num_dropped: int, dtype: torch.dtype) -> Tensor:
    """Return the entries of a mask in some rows (See Rule 3)."""
    kind, num_each, least = draws.lanes_for(num_dropped)
    lanes = _words(rows, -(-width // num_each), seed).view(kind)[:, :width]
    kept = torch.empty(lanes.shape, dtype=dtype, device=rows.device)
    return torch.ge(lanes, least, out=kept).mul_(draws.scale_for(num_dropped, dtype))


def _normals(rows: Tensor, width: int, seed: int) -> Tensor:
    """Return the entries of Gaussian noise in some rows, in float32 (See Rule 4)."""
    num_pairs = -(-width // 2)
    words = _words(rows, num_pairs, seed).view(torch.int32)
    sign = words[:, 1::2].to(torch.float32)
    radius = _radius(sign.abs())
    turn = words[:, ::2].to(torch.float32).mul_(2.0**-32)  # of half a turn, from -0.5 to 0.5
    square = turn * turn
    sine = _polynomial(square, _SIN).mul_(turn).mul_(radius)
    cosine = _polynomial(square, _COS).mul_(torch.copysign(radius, sign))
    return torch.cat([cosine, sine], dim=1)[:, :width]


def _radius(number: Tensor) -> Tensor:
    """Return sqrt(-2 ln(number / 2**31)) for whole numbers from 0 to 2**31; that of 1 for 0."""
    bits = number.clamp_(min=1.0).view(torch.int32)  # a number is fraction * 2 ** (exponent - 127)
    exponent = (bits >> 23).to(torch.float32)
    fraction = bits.bitwise_and_(0x7FFFFF).bitwise_or_(0x3F800000).view(torch.float32)
    square = _polynomial(fraction.sub_(1.5), _LOG)
    square.add_(exponent.sub_(127 + 31).mul_(-2 * _LN_2)).clamp_(min=1e-12)
    return square.rsqrt().mul_(square)  # `sqrt` is MKL's


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    *others, last = coefficients
    value = x * last
    for coefficient in reversed(others[1:]):
        value.add_(coefficient).mul_(x)
    return value.add_(others[0])


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
