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
Rule 4. The weight of an embedding, of which a forward may need a few rows, is drawn by
        `row_draws.py`, which takes longer for a whole table.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from recoup._core.generators import generator_at_hand, own_generator
from recoup._core.rng import hash_seed

__all__ = [
    "check",
    "dropped",
    "empty_like",
    "lanes_for",
    "noise_beside",
    "noised",
    "num_dropped_of",
    "piece_for",
    "scale_for",
    "scales",
    "uniforms",
]

_CHUNK = 2**17  # entries (See Rule 1)
_PIECE = 2**15  # entries that an operator works on (See Rule 3)
_GPU_PIECE = 2**22

_Write = Callable[[torch.Generator, slice], None]  # a piece of a result


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
    check(weight.dtype, seed)
    out = empty_like(weight) if out is None else out
    num_dropped = num_dropped_of(p)
    if num_dropped == 65536:
        return out.zero_()
    if num_dropped == 0:
        return out if out is weight else out.copy_(weight)
    if axes and any(weight.shape[axis] != 1 for axis in axes):
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(weight.shape))
        mask = scales(shape, seed, p, dtype=weight.dtype, device=weight.device)
        return torch.mul(weight, mask, out=out)
    scale = scale_for(num_dropped, out.dtype)
    kind, num_each, least = lanes_for(num_dropped)
    if _is_small(out):
        numel = out.numel()
        lanes = _words(-(-numel // num_each), out, _generator(out, seed)).view(kind)
        kept = (lanes[:numel] if numel % num_each else lanes).ge_(least).view(out.shape)
        return torch.mul(weight, kept, out=out).mul_(scale)
    source, flat = _flat(weight, out), out.view(-1)
    zero = torch.zeros((), dtype=out.dtype, device=out.device)

    def write(generator: torch.Generator, place: slice) -> None:
        num = place.stop - place.start
        lanes = _words(-(-num // num_each), out, generator).view(kind)[:num]
        kept = torch.ge(lanes, least, out=torch.empty(num, dtype=out.dtype, device=out.device))
        torch.addcmul(zero, source[place], kept, value=scale, out=flat[place])

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
    check(weight.dtype, seed)
    out = empty_like(weight) if out is None else out
    if _is_small(out):
        return torch.add(weight, _little_noise(out, seed, std), out=out)
    source, flat = _flat(weight, out), out.view(-1)
    kind = torch.promote_types(out.dtype, torch.float32)

    def write(generator: torch.Generator, place: slice) -> None:
        noise = torch.empty(place.stop - place.start, dtype=kind, device=out.device)
        noise = noise.normal_(0.0, std, generator=generator).to(out.dtype)
        torch.add(source[place], noise, out=flat[place])

    _share(out, seed, write)
    return out


def noise_beside(weight: Tensor, seed: int, std: float) -> Tensor | None:
    """Return what `noised` adds to `weight`; None where it is more than a piece."""
    return _little_noise(weight, seed, std) if _is_small(weight) else None


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
    check(dtype, seed)
    out = torch.empty(shape, dtype=dtype, device=device)
    flat, kind = out.view(-1), torch.promote_types(dtype, torch.float32)

    def write(generator: torch.Generator, place: slice) -> None:
        part = torch.empty(place.stop - place.start, dtype=kind, device=device)
        flat[place] = part.uniform_(generator=generator)

    _share(out, seed, write)
    return out


def empty_like(weight: Tensor) -> Tensor:
    """Return a contiguous tensor for a result."""
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def check(dtype: torch.dtype, seed: int) -> None:
    """Raise if numbers of a type cannot be drawn for, or `seed` is none."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"`seed` is {seed}, but must be from 0 to 2**63 - 1.")
    if not dtype.is_floating_point:
        raise ValueError(f"`weight` is {dtype}, but must be of a floating-point type.")


def num_dropped_of(p: float) -> int:
    """Return of how many in 65536 entries one is dropped (See Rule 2)."""
    if not 0 <= p <= 1:
        raise ValueError(f"`p` is {p}, but must be a share of entries from 0 to 1.")
    return round(p * 65536)


def scale_for(num_dropped: int, dtype: torch.dtype) -> float:
    """Return what entries that are kept are multiplied by."""
    scale = 65536 / (65536 - num_dropped)
    if dtype.itemsize == 2:
        # The scale as the dtype has it: torch would multiply with the exact one. It is finite.
        scale = torch.tensor(scale, dtype=dtype).clamp_(max=torch.finfo(dtype).max).item()
    return scale


def lanes_for(num_dropped: int) -> tuple[torch.dtype, int, int]:
    """Return the dtype to view words in, the entries per word, and the least value that is kept."""
    if num_dropped % 256 == 0:
        return torch.int8, 8, num_dropped // 256 - 128
    return torch.int16, 4, num_dropped - 32768


def piece_for(device: torch.device) -> int:
    """Return the number of entries that an operator works on at once."""
    return _PIECE if device.type == "cpu" else _GPU_PIECE


def _is_small(out: Tensor) -> bool:
    """Whether a draw is one piece, so that its cost is the number of operators."""
    return out.numel() <= _PIECE and out.device.type == "cpu"


def _generator(out: Tensor, seed: int) -> torch.Generator:
    return generator_at_hand(out.device, hash_seed(seed, 0))


def _words(num: int, out: Tensor, generator: torch.Generator) -> Tensor:
    # All 64 bits: without a range, the first would be zero.
    words = torch.empty(num, dtype=torch.int64, device=out.device)
    return words.random_(-(2**63), None, generator=generator)


def _little_noise(like: Tensor, seed: int, std: float) -> Tensor:
    """Return noise of one piece, in the shape and dtype of `like`, contiguous."""
    kind = torch.promote_types(like.dtype, torch.float32)
    noise = torch.empty(like.shape, dtype=kind, device=like.device)
    return noise.normal_(0.0, std, generator=_generator(like, seed)).to(like.dtype)


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
        work(_generator(out, seed), 0, numel)
    elif num_threads > 1:
        with ThreadPoolExecutor(num_threads, "recoup-draws") as pool:
            for _ in pool.map(work_on_chunk, chunks):  # which raises what a thread has raised
                pass
    else:
        for chunk in chunks:
            work_on_chunk(chunk)
