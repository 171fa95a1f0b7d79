"""Dropped and noisy weights, computed from a seed.

NOTE [ An entry of a draw depends on the seed and on its place ]

Rule 1. A draw is cut in chunks of 131072 entries, and each has a generator of its own, whose seed
        is a hash of the seed of the draw and the number of the chunk. (Torch's generator takes 32
        bits of it.) So any number of threads may share the chunks, and no state is moved.
Rule 2. An entry of a mask is 16 bits of a random word of 64, and dropped if they are below
        p * 65536: one draw for four entries, and the same entries in any dtype and layout. p counts
        as the nearest multiple of 1/65536, in the mask and in the scale 1/(1 - p), so the mean over
        seeds is the raw weight. For a multiple of 1/256, 8 bits suffice.
Rule 3. Torch's generators draw in one thread. So threads are started for a call and end with it:
        none is alive at a fork or at exit. Operators leave the interpreter to the other threads
        while they run, and on 32768 elements or fewer they start no threads of their own.
Rule 4. A draw of one piece takes as long as its operators are many. So it is made on its own, and
        torch adds it or multiplies by it; autograd holds the recipe of a mask in its place.
Rule 5. The weight of an embedding, of which a forward may need a few rows, is drawn by
        `row_draws.py`, which takes longer for a whole table.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes as no_modes

from recoup._core.generators import own_generator
from recoup._core.rng import hash_seed
from recoup._core.saved_tensors import untransformed

_CHUNK = 2**17  # entries (See Rule 1)
_CPU = torch.device("cpu")
_PIECE = 2**15  # entries that an operator works on (See Rule 3)
_GPU_PIECE = 2**22

_Write = Callable[[torch.Generator, slice], None]  # a piece of a result


class _Local(threading.local):
    def __init__(self) -> None:
        self.generator = torch.Generator()


_local = _Local()


class Rate(NamedTuple):
    """A probability as masks have it (See Rule 2).

    Attributes:
        num_dropped: of 65536 entries.
        lanes: the type in which words are viewed.
        num_lanes: the entries for each word.
        least: the least value of a lane that is kept.
        scale: what entries that are kept are multiplied by, as the type of the weight has it.
        constants: the two as tensors, from which an operator takes half the time.
    """

    num_dropped: int
    lanes: torch.dtype
    num_lanes: int
    least: int
    scale: float
    constants: tuple[Tensor, Tensor]


@functools.lru_cache(1024)
def rate_of(p: float, dtype: torch.dtype) -> Rate:
    """Return the rate of which `p` is the probability, for weights of a type."""
    if not 0 <= p <= 1:
        raise ValueError(f"`p` is {p}, but must be a share of entries from 0 to 1.")
    num_dropped = round(p * 65536)
    scale = 65536 / (65536 - num_dropped) if num_dropped < 65536 else 0.0
    if dtype.itemsize == 2 and dtype.is_floating_point:
        # Torch would multiply with the exact scale. That of the type is finite.
        scale = torch.tensor(scale, dtype=dtype).clamp_(max=torch.finfo(dtype).max).item()
    lanes, num_lanes, least = torch.int16, 4, num_dropped - 32768
    if num_dropped % 256 == 0:
        lanes, num_lanes, least = torch.int8, 8, num_dropped // 256 - 128
    with no_modes(), untransformed():  # they are cached
        least_kept = torch.tensor(min(least, torch.iinfo(lanes).max), dtype=lanes, device=_CPU)
        constants = least_kept, torch.tensor(scale, dtype=dtype, device=_CPU)
    return Rate(num_dropped, lanes, num_lanes, least, scale, constants)


def dropped(
    weight: Tensor, seed: int, p: float, axes: tuple[int, ...] = (), *, out: Tensor | None = None
) -> Tensor:
    """Return `weight` with entries dropped and the others scaled, in a contiguous tensor.

    Equal to `weight * scales(shape, seed, p)`, where `shape` is that of `weight` with 1 at `axes`.

    Args:
        weight: any floating-point tensor.
        seed: from 0 to 2**63 - 1; the same seed drops the same entries of a shape.
        p: share of entries that is dropped; counts as the nearest multiple of 1/65536. In float16
            and bfloat16, the scale 1/(1 - p) is rounded too.
        axes: along which entries are dropped together, from 0 to `weight.dim() - 1`.
        out: where to write, contiguous; may be `weight`. A new tensor if None.

    Returns:
        A tensor of the shape, dtype and device of `weight`; all zeros if p is 1.

    Raises:
        ValueError: if `seed` or `p` is out of range, or `weight` has no floating-point numbers.
    """
    mask = mask_beside(weight, seed, p, axes)
    if mask is not None:
        made = mask.get()
        return torch.mul(weight, made, out=made if out is None else out)
    out, rate = starting(weight, seed, out), rate_of(p, weight.dtype)
    if rate.num_dropped == 65536:
        return out.zero_()
    if rate.num_dropped == 0:
        return out if out is weight else out.copy_(weight)
    if any(weight.shape[axis] != 1 for axis in axes):
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(weight.shape))
        mask = scales(shape, seed, p, dtype=weight.dtype, device=weight.device)
        return torch.mul(weight, mask, out=out)
    source, flat = _flat(weight, out), out.view(-1)
    zero = torch.zeros((), dtype=out.dtype, device=out.device)

    def write(generator: torch.Generator, place: slice) -> None:
        kept = torch.empty(place.stop - place.start, dtype=out.dtype, device=out.device)
        kept = _kept(kept, rate, generator, rate.least)
        torch.addcmul(zero, source[place], kept, value=rate.scale, out=flat[place])

    _share(out, seed, write)
    return out


def noised(weight: Tensor, seed: int, std: float, *, out: Tensor | None = None) -> Tensor:
    """Return `weight` with Gaussian noise added, in a contiguous tensor.

    Equal to `weight + noised(torch.zeros_like(weight), seed, std)`: noise is rounded to the dtype
    of `weight` before it is added.

    Args:
        weight: any floating-point tensor.
        seed: from 0 to 2**63 - 1.
        std: standard deviation of the noise, in the unit of `weight`.
        out: where to write, contiguous; may be `weight`. A new tensor if None.

    Returns:
        A tensor of the shape, dtype and device of `weight`.

    Raises:
        ValueError: if `seed` is out of range, or `weight` has no floating-point numbers.
    """
    noise = noise_beside(weight, seed, std)
    if noise is not None:
        return noise.add_(weight) if out is None else torch.add(weight, noise, out=out)
    out = starting(weight, seed, out)
    source, flat = _flat(weight, out), out.view(-1)
    kind = torch.promote_types(out.dtype, torch.float32)

    def write(generator: torch.Generator, place: slice) -> None:
        noise = torch.empty(place.stop - place.start, dtype=kind, device=out.device)
        noise = noise.normal_(0.0, std, generator=generator).to(out.dtype)
        torch.add(source[place], noise, out=flat[place])

    _share(out, seed, write)
    return out


def mask_beside(weight: Tensor, seed: int, p: float, axes: tuple[int, ...] = ()) -> Mask | None:
    """Return the mask of `dropped`; None where it is more than a piece, or none."""
    rate = rate_of(p, weight.dtype)
    is_piece = weight.numel() <= _PIECE and weight.is_cpu and weight.is_floating_point()
    if axes or not is_piece or seed >> 63 or not 0 < rate.num_dropped < 65536:
        return None
    return Mask(weight.shape, weight.dtype, seed, rate)


class Mask(NamedTuple):
    """What `dropped` multiplies a weight by, of one piece; autograd holds it in place of that."""

    shape: torch.Size
    dtype: torch.dtype
    seed: int
    rate: Rate

    def get(self) -> Tensor:
        """Draw the mask."""
        kept = torch.empty(self.shape, dtype=self.dtype, device=_CPU)
        generator = _local.generator.manual_seed(hash_seed(self.seed, 0))
        least, scale = self.rate.constants
        return _kept(kept, self.rate, generator, least).mul_(scale)

    def pack(self, _: Tensor) -> Mask:
        """Return what autograd holds."""
        return self


def noise_beside(weight: Tensor, seed: int, std: float) -> Tensor | None:
    """Return what `noised` adds to `weight`; None where it is more than a piece."""
    if weight.numel() > _PIECE or not weight.is_cpu:
        return None
    is_half = weight.dtype.itemsize < 4
    noise = starting(weight, seed, None, torch.float32 if is_half else None)
    noise.normal_(0.0, std, generator=_local.generator.manual_seed(hash_seed(seed, 0)))
    return noise.to(weight.dtype) if is_half else noise


def scales(
    shape: tuple[int, ...], seed: int, p: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the mask that `dropped` multiplies by: 0 where an entry is dropped, else 1/(1 - p)."""
    ones = torch.ones(shape, dtype=dtype, device=device)
    return dropped(ones, seed, p, out=ones)


def uniforms(
    shape: tuple[int, ...], seed: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return numbers that are uniform from 0 to 1; below 1 before they are rounded to `dtype`."""
    out = torch.empty(shape, dtype=dtype, device=device)
    flat, kind = starting(out, seed, out).view(-1), torch.promote_types(dtype, torch.float32)

    def write(generator: torch.Generator, place: slice) -> None:
        part = torch.empty(place.stop - place.start, dtype=kind, device=device)
        flat[place] = part.uniform_(generator=generator)

    _share(out, seed, write)
    return out


def starting(
    weight: Tensor, seed: int, out: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a contiguous tensor for a result, or raise if there is none for these arguments."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"`seed` is {seed}, but must be from 0 to 2**63 - 1.")
    if not weight.is_floating_point():
        raise ValueError(f"`weight` is {weight.dtype}, but must be of a floating-point type.")
    if out is None:
        out = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    return out


def piece_for(device: torch.device) -> int:
    """Return the number of entries that an operator works on at once."""
    return _PIECE if device.type == "cpu" else _GPU_PIECE


def _kept(out: Tensor, rate: Rate, generator: torch.Generator, least: int | Tensor) -> Tensor:
    """Set `out` to 1 where an entry is kept, and to 0 where it is dropped."""
    num, num_lanes = out.numel(), rate.num_lanes
    words = torch.empty(-(-num // num_lanes), dtype=torch.int64, device=out.device)
    # All 64 bits: without a range, the first would be zero.
    lanes = words.random_(-(2**63), None, generator=generator).view(rate.lanes)
    lanes = lanes if num % num_lanes == 0 else lanes[:num]
    return torch.ge(lanes.view(out.shape), least, out=out)


def _flat(weight: Tensor, out: Tensor) -> Tensor:
    """Return the entries of `weight` in the order of `out`, there if they have to be copied."""
    return (weight if weight.is_contiguous() else out.copy_(weight)).detach().view(-1)


def _share(out: Tensor, seed: int, write: _Write) -> None:
    """Have `write` write all pieces, by as many threads as torch has (See Rule 3)."""
    numel, device, piece = out.numel(), out.device, piece_for(out.device)
    if device.type == "meta":
        return
    is_inference = torch.is_inference_mode_enabled()

    def work(generator: torch.Generator, start: int, end: int) -> None:
        with torch.inference_mode(is_inference), torch.no_grad():  # those of a thread are its own
            for begin in range(start, end, piece):
                write(generator, slice(begin, min(begin + piece, end)))

    def work_on_chunk(chunk: int) -> None:
        generator = own_generator(device, hash_seed(seed, chunk))
        work(generator, chunk * _CHUNK, min((chunk + 1) * _CHUNK, numel))

    chunks = range(-(-numel // _CHUNK))
    num_threads = min(torch.get_num_threads(), len(chunks) // 2)
    if device.type != "cpu":
        work(own_generator(device, hash_seed(seed, 0)), 0, numel)
    elif num_threads > 1:
        with ThreadPoolExecutor(num_threads, "recoup-draws") as pool:
            for _ in pool.map(work_on_chunk, chunks):  # which raises what a thread has raised
                pass
    else:
        for chunk in chunks:
            work_on_chunk(chunk)
