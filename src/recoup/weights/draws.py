"""From a seed to a dropped or noisy weight.

NOTE [ An entry of a draw depends on the seed and on its place ]

Rule 1. Draws are hashed numbers, not the stream of a generator: they may be cut in any way and
        shared by any number of threads, and no state moves. A number gives two words of 64 bits:
        the first is the hash of SplitMix64, the second is the first hashed once more. Shifts keep
        the sign, as torch's do, so the last step of a word adds where others mask and xor.
Rule 2. Of n entries of a mask, number i and number n/2 + i (n rounded up to a multiple of 8) take
        16 bits of the words that i // 4 gives. One is dropped if they are below p * 65536, in any
        dtype and layout and on any device. p counts as the nearest multiple of 1/65536, for the
        mask and for the scale 1/(1 - p), so the mean over seeds is the raw weight.
Rule 3. Of n normals, number i and number n/2 + i (n rounded up to a multiple of 2) come from one
        radius, out of a first word, and one angle, out of its second (Box and Muller), each with
        as many bits as a normal has. Torch's own ways to draw one take one thread.
Rule 4. Torch shares an operator among threads from 32768 elements a thread on. A block is as large
        as that asks for, yet small enough for a cache, and its buffers take at most a byte for
        each entry of the weight. All operators run on a block before the next one.
Rule 5. On few entries operators cost more than what they do, and on some more there is no work for
        two threads. There torch's generator makes words, or normals, in one operator. Which of
        both ways is taken depends on the number of entries and on the kind of device alone.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from recoup.residuals.sources import own_generator

__all__ = ["dropped", "dropped_", "noised", "noised_", "scales"]

_64_BITS = 2**64 - 1
# The constants of SplitMix64, and a fourth from the digits of the root of two.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_THIRD = 0x6A09E667F3BCC909
_FEW = 2**18  # entries (See Rule 5)
_PIECE = 32768  # elements that torch gives to a thread (See Rule 4)
_GPU_PIECES = 32
_CPU = torch.device("cpu")


def dropped(weight: Tensor, seed: int, p: float, axes: tuple[int, ...] = ()) -> Tensor:
    """Return `weight` with entries dropped and the others scaled, in a new contiguous tensor.

    Equal to `weight * scales(shape, seed, p)`, where `shape` is that of `weight` with 1 at `axes`.

    Args:
        weight: any floating-point tensor.
        seed: from 0 to 2**63 - 1; the same seed drops the same entries of a shape.
        p: share of entries that is dropped; counts as the nearest multiple of 1/65536. In float16
            and bfloat16, the scale 1/(1 - p) is rounded too.
        axes: along which entries are dropped together, from 0 to `weight.dim() - 1`.

    Returns:
        As `weight`; all zeros if p is 1.

    Raises:
        ValueError: if `seed` or `p` is out of range, or `weight` has no floating-point numbers.
    """
    _check(weight.dtype, seed)
    return _drop(weight, _empty_like(weight), seed, p, axes)


def dropped_(weight: Tensor, seed: int, p: float, axes: tuple[int, ...] = ()) -> Tensor:
    """Do what `dropped` does, in place; a weight that is not contiguous is copied on the way."""
    _check(weight.dtype, seed)
    if weight.is_contiguous():
        return _drop(weight, weight, seed, p, axes)
    return weight.copy_(_drop(weight, _empty_like(weight), seed, p, axes))


def noised(weight: Tensor, seed: int, std: float) -> Tensor:
    """Return `weight` with Gaussian noise added, in a new contiguous tensor.

    Equal to `weight + noised_(torch.zeros_like(weight), seed, std)`: noise is rounded to the dtype
    of `weight` before it is added.

    Args:
        weight: any floating-point tensor.
        seed: from 0 to 2**63 - 1.
        std: standard deviation of the noise, in the unit of `weight`.

    Returns:
        As `weight`.

    Raises:
        ValueError: if `seed` is out of range, or `weight` has no floating-point numbers.
    """
    _check(weight.dtype, seed)
    return _add_noise(weight, _empty_like(weight), seed, std)


def noised_(weight: Tensor, seed: int, std: float) -> Tensor:
    """Do what `noised` does, in place; a weight that is not contiguous is copied on the way."""
    _check(weight.dtype, seed)
    if weight.is_contiguous():
        return _add_noise(weight, weight, seed, std)
    return weight.copy_(_add_noise(weight, _empty_like(weight), seed, std))


def scales(
    shape: tuple[int, ...], seed: int, p: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return what `dropped` multiplies with: 0 where an entry is dropped, else 1/(1 - p).

    Args:
        shape: of the mask.
        seed: as for `dropped`.
        p: as for `dropped`.
        dtype: of the result.
        device: of the result.

    Raises:
        ValueError: as `dropped`.
    """
    _check(dtype, seed)
    out = torch.empty(shape, dtype=dtype, device=device)
    num_dropped = _num_dropped(p)
    if num_dropped in (0, 65536):
        return out.fill_(num_dropped == 0)
    kernels = _kernels(out.device)
    if kernels is not None:
        kernels.write_scales(out, _key(seed), num_dropped, _scale(num_dropped, dtype))
        return out
    flat, scale = out.view(-1), _scale(num_dropped, dtype)
    for start, piece in _mask_pieces(out, seed, num_dropped):
        torch.mul(piece, scale, out=flat[start : start + piece.numel()])
    return out


def _empty_like(weight: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _check(dtype: torch.dtype, seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise ValueError(f"`seed` is {seed}: give one from 0 to 2**63 - 1.")
    if not dtype.is_floating_point:
        raise ValueError(f"`weight` is {dtype}: only floating-point weights can be drawn for.")


def _num_dropped(p: float) -> int:
    """Return of how many in 65536 entries one is dropped (See Rule 2)."""
    if not 0 <= p <= 1:
        raise ValueError(f"`p` is {p}: give a share of entries, from 0 to 1.")
    return round(p * 65536)


def _scale(num_dropped: int, dtype: torch.dtype) -> float:
    scale = 65536 / (65536 - num_dropped)
    if dtype.itemsize == 2:
        # The scale as the dtype has it: torch would multiply with the exact one. It is finite.
        scale = torch.tensor(scale, dtype=dtype).clamp_(max=torch.finfo(dtype).max).item()
    return scale


# --- what is done with a draw --------------------------------------------------------------------


def _drop(weight: Tensor, out: Tensor, seed: int, p: float, axes: tuple[int, ...]) -> Tensor:
    """Write to `out`, which is contiguous and may be `weight`."""
    num_dropped = _num_dropped(p)
    if num_dropped == 65536:
        return out.zero_()
    if num_dropped == 0:
        return out if out is weight else out.copy_(weight)
    if any(weight.shape[axis] != 1 for axis in axes):
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(weight.shape))
        mask = scales(shape, seed, p, dtype=weight.dtype, device=weight.device)
        return torch.mul(weight, mask, out=out)
    numel, scale = out.numel(), _scale(num_dropped, out.dtype)
    kernels = _kernels(out.device)
    if kernels is not None:
        kernels.drop(weight.contiguous(), out, _key(seed), num_dropped, scale)
        return out
    if numel <= _PIECE and _is_small(out):
        lanes = _few_lanes(numel, _generator(seed), num_dropped - 32768).view_as(out)
        return torch.mul(weight, lanes, out=out).mul_(scale)
    source, flat = _flat(weight, out), out.view(-1)
    zero = torch.zeros((), dtype=out.dtype, device=out.device)
    for start, piece in _mask_pieces(out, seed, num_dropped):
        place = slice(start, start + piece.numel())
        torch.addcmul(zero, source[place], piece, value=scale, out=flat[place])
    return out


def _add_noise(weight: Tensor, out: Tensor, seed: int, std: float) -> Tensor:
    """Write to `out`, which is contiguous and may be `weight`."""
    kernels = _kernels(out.device)
    if kernels is not None:
        kernels.add_noise(weight.contiguous(), out, _key(seed), std)
        return out
    source, flat = _flat(weight, out), out.view(-1)
    for start, piece in _noise_pieces(out, seed, std):
        place = slice(start, start + piece.numel())
        torch.add(source[place], piece.to(out.dtype), out=flat[place])
    return out


def _flat(weight: Tensor, out: Tensor) -> Tensor:
    """Return the entries of `weight` in the order of `out`, there if they have to be copied."""
    return (weight if weight.is_contiguous() else out.copy_(weight)).view(-1)


def _mask_pieces(out: Tensor, seed: int, num_dropped: int) -> Iterator[tuple[int, Tensor]]:
    """Yield a mask of 0 and 1, each piece with its place; it is overwritten by the next."""
    numel, least = out.numel(), num_dropped - 32768
    if _is_small(out):
        generator = _generator(seed)
        for start in range(0, numel, _PIECE):
            lanes = _few_lanes(min(_PIECE, numel - start), generator, least)
            yield start, lanes.to(out.dtype)
        return
    words, spare = _buffers(2, 16, out)
    lanes, piece = words.view(torch.int16), spare.view(out.dtype)
    num_words = -(-numel // 8)
    half = 4 * num_words
    for first in range(0, num_words, words.numel()):
        _write_words(words, spare, _key(seed) + first)
        for begin, end in ((0, min(half, numel)), (half, numel)):
            if begin == half:
                _hash_on(words, spare)
            for at in range(0, min(lanes.numel(), end - begin - 4 * first), piece.numel()):
                start = begin + 4 * first + at
                part = lanes[at : at + min(piece.numel(), end - start)]
                yield start, torch.ge(part, least, out=piece[: part.numel()])


def _noise_pieces(out: Tensor, seed: int, std: float) -> Iterator[tuple[int, Tensor]]:
    """Yield all noise, each piece with its place; it is overwritten by the next (See Rule 3)."""
    numel, is_wide = out.numel(), out.dtype is torch.float64
    dtype, bits = (torch.float64, torch.int64) if is_wide else (torch.float32, torch.int32)
    if _is_small(out):
        generator = _generator(seed)
        for start in range(0, numel, _PIECE):
            noise = torch.empty(min(_PIECE, numel - start), dtype=dtype, device=out.device)
            yield start, noise.normal_(0.0, std, generator=generator)
        return
    words, spare, third = _buffers(3, 28, out)
    radius, angle, sine = spare.view(dtype), third.view(dtype), words.view(dtype)
    half, whole = -(-numel // 2), 2.0 ** (63 if is_wide else 31)
    for start in range(0, half, radius.numel()):
        _write_words(words, spare, _key(seed) + start * words.numel() // radius.numel())
        radius.copy_(words.view(bits).bitwise_or_(1))  # a logarithm follows
        radius.abs_().mul_(1 / whole).log_().mul_(-2).sqrt_().mul_(std)
        _hash_on(words, third)
        angle.copy_(words.view(bits)).mul_(math.pi / whole)
        torch.sin(angle, out=sine).mul_(radius)
        angle.cos_().mul_(radius)
        yield start, angle[: half - start]
        yield half + start, sine[: numel - half - start]


# --- words ---------------------------------------------------------------------------------------


def _is_small(out: Tensor) -> bool:
    return out.device.type == "cpu" and out.numel() <= _FEW


def _generator(seed: int) -> torch.Generator:
    return own_generator(_CPU, _key(seed))  # hashed, since it would take 32 bits of a seed


def _few_lanes(numel: int, generator: torch.Generator, least: int) -> Tensor:
    """Return the next entries of a mask: 1 for 16 bits that are at least `least`, else 0."""
    words = torch.empty(-(-numel // 4), dtype=torch.int64, device=_CPU)
    words.random_(-(2**63), None, generator=generator)  # all 64 bits; without a range, 63
    lanes = words.view(torch.int16)
    return (lanes if numel % 4 == 0 else lanes[:numel]).ge_(least)


def _buffers(num: int, share: int, out: Tensor) -> tuple[Tensor, ...]:
    """Return `num` buffers of words, at most one for `share` entries (See Rule 4)."""
    num_threads = torch.get_num_threads() if out.device.type == "cpu" else _GPU_PIECES
    length = max(1, min(_PIECE * num_threads, -(-out.numel() // share)))
    return tuple(torch.empty(length, dtype=torch.int64, device=out.device) for _ in range(num))


def _key(seed: int) -> int:
    """Return where the counters of a draw start: below 2**62, so that none of them overflows."""
    key = (seed + _GOLDEN) & _64_BITS
    key = ((key ^ (key >> 30)) * _FIRST) & _64_BITS
    key = ((key ^ (key >> 27)) * _SECOND) & _64_BITS
    return (key ^ (key >> 31)) >> 2


def _signed(number: int) -> int:
    return number - (number >> 63 << 64)


def _write_words(words: Tensor, spare: Tensor, first: int) -> None:
    """Write the first words of the numbers from `first` on (See Rule 1)."""
    torch.arange(first, first + words.numel(), out=words, device=words.device)
    words.mul_(_signed(_GOLDEN))
    words.bitwise_xor_(torch.bitwise_right_shift(words, 30, out=spare)).mul_(_signed(_FIRST))
    words.bitwise_xor_(torch.bitwise_right_shift(words, 27, out=spare)).mul_(_signed(_SECOND))
    words.add_(torch.bitwise_right_shift(words, 32, out=spare))


def _hash_on(words: Tensor, spare: Tensor) -> None:
    """Turn first words into second ones (See Rule 1)."""
    words.bitwise_xor_(torch.bitwise_right_shift(words, 29, out=spare)).mul_(_THIRD)
    words.add_(torch.bitwise_right_shift(words, 32, out=spare))


# --- on a GPU ------------------------------------------------------------------------------------


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    """Return the kernels for `device`, if it is a GPU that they run on."""
    if device.type != "cuda":
        return None
    try:
        from recoup.weights import kernels

        kernels.write_scales(torch.empty(1, device=device), 0, 1, 1.0)
    except ImportError:
        return None
    except Exception as error:  # noqa: BLE001  # Compilers raise whatever they like.
        warnings.warn(
            f"Triton is installed but does not run on {device}, so draws take more passes: {error}",
            stacklevel=2,
        )
        return None
    return kernels
