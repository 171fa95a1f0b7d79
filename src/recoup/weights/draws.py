"""Dropped and noisy weights, computed from a seed.

NOTE [ An entry of a draw depends on the seed and on its place ]

Rule 1. A draw is cut in chunks of 131072 entries, and each has a generator of its own, whose seed
        is a hash of the seed of the draw and the number of the chunk. (Torch's generator takes 32
        bits of it.) So any number of threads may share the chunks, and no state is moved.
Rule 2. An entry of a mask is 16 bits of a random word of 64, and dropped if they are below
        p * 65536: one draw for four entries, and the same entries in any dtype and layout. p counts
        as the nearest multiple of 1/65536, in the mask and in the scale 1/(1 - p), so the mean over
        seeds is the raw weight. For a multiple of 1/256, 8 bits suffice. At p = 1 the scale is 0.
Rule 3. Torch's generators draw in one thread. So threads are started for a call and end with it:
        none is alive at a fork or at exit. Operators leave the interpreter to the other threads
        while they run, and on 32768 elements or fewer they start no threads of their own.
Rule 4. A draw of one piece takes as long as its operators are many. So it is made on its own, and
        torch adds it or multiplies by it; autograd holds the recipe of a mask in its place.
Rule 5. Where tensors have no values, a draw is made in one thread (a FakeTensorMode is that of a
        thread) and at most 16 pieces, since operators take as long for a small one as for a large.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes as no_modes

from recoup._core.devices import own_generator
from recoup._core.rng import hash_seed
from recoup._core.saved_tensors import untransformed
from recoup._core.tensors import has_values

_CHUNK = 2**17  # entries (See Rule 1)
_CPU = torch.device("cpu")
_PIECE = 2**15  # entries that an operator works on (See Rule 3)
_GPU_PIECE = 2**22

_Draw = Callable[[torch.Generator, int], Tensor]  # of so many entries


class _Local(threading.local):
    def __init__(self) -> None:
        self.generator = torch.Generator()


_local = _Local()


class Rate(NamedTuple):
    """A probability as masks have it (See Rule 2)."""

    lanes: torch.dtype  # in which words are viewed
    num_lanes: int  # the entries for each word
    scale: float  # of entries that are kept, as the type of the weight has it
    # The least value of a lane that is kept, and the scale: as tensors, from which an operator
    # takes half the time, or as numbers for tensors without values.
    constants: tuple[Tensor, Tensor] | tuple[int, float]


@functools.lru_cache(1024)
def rate_of(p: float, dtype: torch.dtype, is_fake: bool = False) -> Rate:
    """Return the rate of which `p` is the probability, for weights of a type."""
    num_dropped = round(p * 65536)
    scale = 65536 / (65536 - num_dropped) if num_dropped < 65536 else 0.0
    lanes, num_lanes, least = torch.int16, 4, num_dropped - 32768
    if num_dropped % 256 == 0:
        lanes, num_lanes, least = torch.int8, 8, num_dropped // 256 - 128
    least = min(least, torch.iinfo(lanes).max)
    with no_modes(), untransformed():  # they are cached
        if dtype.itemsize == 2:
            # Torch would multiply with the exact scale. That of the type is finite.
            scale = torch.tensor(scale, dtype=dtype).clamp_(max=torch.finfo(dtype).max).item()
        least_kept = torch.tensor(least, dtype=lanes, device=_CPU)
        constants = least_kept, torch.tensor(scale, dtype=dtype, device=_CPU)
    return Rate(lanes, num_lanes, scale, (least, scale) if is_fake else constants)


def dropped(
    weight: Tensor, seed: int, p: float, axes: tuple[int, ...] = (), *, in_place: bool = False
) -> Tensor:
    """Return `weight` with entries dropped and the others scaled, in a contiguous tensor.

    Entries are dropped together along `axes`. Equal to `weight * scales(shape, seed, p)`, where
    `shape` is that of `weight` with 1 at `axes`. The weight may be written to if `in_place`.
    """
    mask = mask_beside(weight, seed, p, axes)
    if mask is not None:
        made = mask.get()
        return torch.mul(weight, made, out=made)
    if any(weight.shape[axis] != 1 for axis in axes):
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(weight.shape))
        mask_of_axes = scales(shape, seed, p, dtype=weight.dtype, device=weight.device)
        return torch.mul(weight, mask_of_axes, out=_result(weight, in_place))
    rate = rate_of(p, weight.dtype, type(weight) is FakeTensor)
    zero = torch.zeros((), dtype=weight.dtype, device=weight.device)

    def draw(generator: torch.Generator, num: int) -> Tensor:
        kept = torch.empty(num, dtype=zero.dtype, device=generator.device)
        return _kept(kept, rate, generator).to(zero.device)

    return _written(weight, seed, draw, partial(torch.addcmul, zero, value=rate.scale), in_place)


def noised(weight: Tensor, seed: int, std: float, *, in_place: bool = False) -> Tensor:
    """Return `weight` with Gaussian noise added, which is rounded to its dtype before."""
    noise = noise_beside(weight, seed, std)
    if noise is not None:
        return noise.add_(weight)

    def fill(piece: Tensor, generator: torch.Generator) -> Tensor:
        return piece.normal_(0.0, std, generator=generator)

    return _written(weight, seed, _filling(weight, fill), torch.add, in_place)


def uniforms(
    shape: tuple[int, ...], seed: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return numbers that are uniform from 0 to 1; below 1 before they are rounded to `dtype`."""
    zeros = torch.zeros(shape, dtype=dtype, device=device)

    def fill(piece: Tensor, generator: torch.Generator) -> Tensor:
        return piece.uniform_(generator=generator)

    return _written(zeros, seed, _filling(zeros, fill), torch.add, in_place=True)


def scales(
    shape: tuple[int, ...], seed: int, p: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the mask that `dropped` multiplies by: 0 where an entry is dropped, else 1/(1 - p)."""
    return dropped(torch.ones(shape, dtype=dtype, device=device), seed, p, in_place=True)


# -- draws of one piece (See Rule 4) ---------------------------------------------------------------


class Mask(NamedTuple):
    """What `dropped` multiplies a weight by, of one piece; autograd holds it in place of that."""

    shape: torch.Size
    dtype: torch.dtype
    seed: int
    rate: Rate

    def get(self) -> Tensor:
        kept = torch.empty(self.shape, dtype=self.dtype, device=_CPU)
        generator = _local.generator.manual_seed(hash_seed(self.seed, 0))
        return _kept(kept, self.rate, generator).mul_(self.rate.constants[1])

    def pack(self, _: Tensor) -> Mask:
        return self


def mask_beside(weight: Tensor, seed: int, p: float, axes: tuple[int, ...] = ()) -> Mask | None:
    """Return the mask of `dropped`; None where it is more than a piece, or shared along axes."""
    if axes or weight.numel() > _PIECE or not weight.is_cpu:
        return None
    dtype, is_fake = weight.dtype, type(weight) is FakeTensor
    return Mask(weight.shape, dtype, seed, rate_of(p, dtype, is_fake))


def noise_beside(weight: Tensor, seed: int, std: float) -> Tensor | None:
    """Return what `noised` adds to `weight`; None where it is more than a piece."""
    if weight.numel() > _PIECE or not weight.is_cpu:
        return None
    is_half = weight.dtype.itemsize < 4
    kind = torch.float32 if is_half else None
    noise = torch.empty_like(weight, dtype=kind, memory_format=torch.contiguous_format)
    noise.normal_(0.0, std, generator=_local.generator.manual_seed(hash_seed(seed, 0)))
    return noise.to(weight.dtype) if is_half else noise


# -- pieces (See Rules 1 and 3) --------------------------------------------------------------------


def _kept(out: Tensor, rate: Rate, generator: torch.Generator) -> Tensor:
    """Set `out` to 1 where an entry is kept, and to 0 where it is dropped."""
    num, num_lanes = out.numel(), rate.num_lanes
    words = torch.empty(-(-num // num_lanes), dtype=torch.int64, device=out.device)
    # All 64 bits: without a range, the first would be zero.
    lanes = words.random_(-(2**63), None, generator=generator).view(rate.lanes)
    lanes = lanes if num % num_lanes == 0 else lanes[:num]
    return torch.ge(lanes.view(out.shape), rate.constants[0], out=out)


def _filling(weight: Tensor, fill: Callable[[Tensor, torch.Generator], Tensor]) -> _Draw:
    """Return a draw that has a piece filled in single precision or more, and then rounded."""
    kind = torch.promote_types(weight.dtype, torch.float32)

    def draw(generator: torch.Generator, num: int) -> Tensor:
        drawn = fill(torch.empty(num, dtype=kind, device=generator.device), generator)
        return drawn.to(weight.device, weight.dtype)

    return draw


def _result(weight: Tensor, in_place: bool) -> Tensor:
    """Return a contiguous tensor for a result: `weight` itself, or a new one."""
    is_reused = in_place and weight.is_contiguous()
    return weight if is_reused else torch.empty_like(weight, memory_format=torch.contiguous_format)


def _written(
    weight: Tensor, seed: int, draw: _Draw, combine: Callable[..., Tensor], in_place: bool
) -> Tensor:
    """Return `combine(weight, draw)`, made by as many threads as torch has."""
    out = _result(weight, in_place)
    source, flat = (weight if weight.is_contiguous() else out.copy_(weight)).detach(), out.view(-1)
    source, device, numel = source.view(-1), out.device, out.numel()
    if device.type == "meta":
        return out
    is_inference = torch.is_inference_mode_enabled()
    is_shared = out.is_cpu and has_values(out)
    size, piece = (_CHUNK, _PIECE) if is_shared else (max(1, numel), _GPU_PIECE)
    if out.is_cpu and not is_shared:  # See Rule 5
        piece = max(_PIECE, -(-numel // 16))

    def work(chunk: int) -> None:
        generator = own_generator(device, hash_seed(seed, chunk))
        end = min((chunk + 1) * size, numel)
        with torch.inference_mode(is_inference), torch.no_grad():  # those of a thread are its own
            for start in range(chunk * size, end, piece):
                place = slice(start, min(start + piece, end))
                combine(source[place], draw(generator, place.stop - start), out=flat[place])

    chunks = range(-(-numel // size))
    num_threads = min(torch.get_num_threads(), len(chunks) // 2)
    if num_threads > 1:
        with ThreadPoolExecutor(num_threads, "recoup-draws") as pool:
            for _ in pool.map(work, chunks):  # which raises what a thread has raised
                pass
    else:
        for chunk in chunks:
            work(chunk)
    return out
