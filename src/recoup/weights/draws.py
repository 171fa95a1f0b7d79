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
        while they run, and on 32768 elements or fewer they start no threads of their own. (Bits
        hashed from counters by operators, and Box and Muller's normals, shared by torch's own
        threads, took as long on idle cores and ten times as long on busy ones: each of a thousand
        operators waits for the slowest thread. `normal_` takes as long as the bits for it.)
Rule 4. A thread works in the grad and inference mode of its caller, in buffers of its own, into a
        result that the caller has made. The caller raises an exception that occurs in it.
Rule 5. A GPU draws with the kernels of `kernels.py` where they run, else with the operators.
Rule 6. The weight of an embedding, of which a forward may need a few rows, is drawn by
        `row_draws.py`, which takes longer for a whole table.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType

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
    "scale_for",
    "scales",
    "uniforms",
]

_CHUNK = 2**17  # entries (See Rule 1)
_PIECE = 2**15  # entries that an operator works on (See Rule 3)
_GPU_PIECE = 2**22

_Chunks = Iterator[tuple[torch.Generator, int, int]]  # its generator, where it starts and ends


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
    return _drop(weight, empty_like(weight) if out is None else out, seed, p, axes)


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
    return _add_noise(weight, empty_like(weight) if out is None else out, seed, std)


def noise_beside(weight: Tensor, seed: int, std: float) -> Tensor | None:
    """Return what `noised` adds to `weight`; None where it is more than a piece."""
    check(weight.dtype, seed)
    return _little_noise(weight, seed, std) if _is_small(weight) else None


def scales(
    shape: tuple[int, ...], seed: int, p: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the mask that `dropped` multiplies by: 0 where an entry is dropped, else 1/(1 - p).

    Args:
        shape: the shape of the mask.
        seed: as for `dropped`.
        p: as for `dropped`.
        dtype: the dtype of the result.
        device: the device of the result.

    Raises:
        ValueError: as for `dropped`.
    """
    check(dtype, seed)
    out = torch.empty(shape, dtype=dtype, device=device)
    num_dropped = num_dropped_of(p)
    if num_dropped in (0, 65536):
        return out.fill_(num_dropped == 0)
    scale = scale_for(num_dropped, dtype)
    kernels = _kernels(out.device)
    if kernels is not None:
        kernels.write_scales(out, seed, num_dropped, scale)
        return out
    if _is_small(out):
        return out.copy_(_few(out, seed, num_dropped)).mul_(scale)
    flat = out.view(-1)

    def write(chunks: _Chunks, num_at_once: int) -> None:
        for place, kept in _masks(chunks, num_at_once, out, num_dropped):
            torch.mul(kept, scale, out=flat[place])

    _share(out, seed, write)
    return out


def uniforms(
    shape: tuple[int, ...], seed: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return numbers that are uniform from 0 to 1; below 1 before they are rounded to `dtype`.

    Args:
        shape: the shape of the result.
        seed: as for `dropped`.
        dtype: the dtype of the result.
        device: the device of the result.

    Raises:
        ValueError: as for `dropped`.
    """
    check(dtype, seed)
    out = torch.empty(shape, dtype=dtype, device=device)
    flat = out.view(-1)

    def write(chunks: _Chunks, num_at_once: int) -> None:
        del num_at_once
        for generator, start, end in chunks:
            part = torch.empty(end - start, dtype=_at_least_float(dtype), device=device)
            flat[start:end] = part.uniform_(generator=generator)

    _share(out, seed, write)
    return out


def _at_least_float(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


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


# --- applying a draw -----------------------------------------------------------------------------


def _drop(weight: Tensor, out: Tensor, seed: int, p: float, axes: tuple[int, ...]) -> Tensor:
    """Write to `out`, which is contiguous and may be `weight`."""
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
    kernels = _kernels(out.device)
    if kernels is not None:
        kernels.drop(weight.contiguous(), out, seed, num_dropped, scale)
        return out
    if _is_small(out):
        return torch.mul(weight, _few(out, seed, num_dropped), out=out).mul_(scale)
    source, flat = _flat(weight, out), out.view(-1)
    zero = torch.zeros((), dtype=out.dtype, device=out.device)

    def write(chunks: _Chunks, num_at_once: int) -> None:
        for place, kept in _masks(chunks, num_at_once, out, num_dropped):
            torch.addcmul(zero, source[place], kept, value=scale, out=flat[place])

    _share(out, seed, write)
    return out


def _add_noise(weight: Tensor, out: Tensor, seed: int, std: float) -> Tensor:
    """Write to `out`, which is contiguous and may be `weight`."""
    kernels = _kernels(out.device)
    if kernels is not None:
        kernels.add_noise(weight.contiguous(), out, seed, std)
        return out
    if _is_small(out):
        return torch.add(weight, _little_noise(out, seed, std), out=out)
    source, flat = _flat(weight, out), out.view(-1)

    def write(chunks: _Chunks, num_at_once: int) -> None:
        del num_at_once
        for place, noise in _normals(chunks, out, std):
            torch.add(source[place], noise, out=flat[place])

    _share(out, seed, write)
    return out


def _flat(weight: Tensor, out: Tensor) -> Tensor:
    """Return the entries of `weight` in the order of `out`, there if they have to be copied."""
    return (weight if weight.is_contiguous() else out.copy_(weight)).view(-1)


# --- draws ---------------------------------------------------------------------------------------


def _generator(out: Tensor, seed: int) -> torch.Generator:
    return generator_at_hand(out.device, hash_seed(seed, 0))


def lanes_for(num_dropped: int) -> tuple[torch.dtype, int, int]:
    """Return the dtype to view words in, the entries per word, and the least value that is kept."""
    if num_dropped % 256 == 0:
        return torch.int8, 8, num_dropped // 256 - 128
    return torch.int16, 4, num_dropped - 32768


def _drawn(words: Tensor, generator: torch.Generator) -> Tensor:
    # All 64 bits: without a range, the first would be zero.
    return words.random_(-(2**63), None, generator=generator)


def _is_small(out: Tensor) -> bool:
    """Whether a draw is one piece, so that its cost is the number of operators."""
    return out.numel() <= _PIECE and out.device.type == "cpu"


def _few(out: Tensor, seed: int, num_dropped: int) -> Tensor:
    """Return a mask of one piece, 0 or 1, in the shape of `out`."""
    numel, (kind, num_each, least) = out.numel(), lanes_for(num_dropped)
    words = torch.empty(-(-numel // num_each), dtype=torch.int64, device=out.device)
    lanes = _drawn(words, _generator(out, seed)).view(kind)
    return (lanes if numel % num_each == 0 else lanes[:numel]).ge_(least).view_as(out)


def _little_noise(like: Tensor, seed: int, std: float) -> Tensor:
    """Return noise of one piece, in the shape and dtype of `like`, contiguous."""
    noise = torch.empty(like.shape, dtype=_at_least_float(like.dtype), device=like.device)
    return noise.normal_(0.0, std, generator=_generator(like, seed)).to(like.dtype)


def _masks(
    chunks: _Chunks, num_at_once: int, out: Tensor, num_dropped: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield pieces of a mask with their places: 0 for a dropped entry, else 1 (See Rule 2)."""
    numel, piece = out.numel(), _PIECE if out.device.type == "cpu" else _GPU_PIECE
    kind, num_each, least = lanes_for(num_dropped)
    num_words = -(-min(num_at_once, numel) // num_each)
    words = torch.empty(num_words, dtype=torch.int64, device=out.device)
    kept = torch.empty(min(piece, numel), dtype=out.dtype, device=out.device)
    for generator, start, end in chunks:
        for first in range(start, end, num_at_once):
            num = min(num_at_once, end - first)
            lanes = _drawn(words[: -(-num // num_each)], generator).view(kind)
            for begin in range(0, num, piece):
                part = lanes[begin : min(begin + piece, num)]
                place = slice(first + begin, first + begin + part.numel())
                yield place, torch.ge(part, least, out=kept[: part.numel()])


def _normals(chunks: _Chunks, out: Tensor, std: float) -> Iterator[tuple[slice, Tensor]]:
    """Yield pieces of noise with their places."""
    piece = _PIECE if out.device.type == "cpu" else _GPU_PIECE
    kind = _at_least_float(out.dtype)
    noise = torch.empty(min(piece, out.numel()), dtype=kind, device=out.device)
    for generator, start, end in chunks:
        for begin in range(start, end, piece):
            place = slice(begin, min(begin + piece, end))
            part = noise[: place.stop - begin].normal_(0.0, std, generator=generator)
            yield place, part.to(out.dtype)


# --- threads -------------------------------------------------------------------------------------


def _share(out: Tensor, seed: int, write: Callable[[_Chunks, int], None]) -> None:
    """Have `write` write all chunks, by as many threads as torch has (See Rules 3 and 4).

    `write` takes chunks, and the number of entries to draw at once: whole chunks where several
    threads work, so that they contend less often.
    """
    numel, device = out.numel(), out.device
    if device.type == "meta":
        return
    if device.type != "cpu":
        write(iter([(_generator(out, seed), 0, numel)]), _GPU_PIECE)
        return
    queue = deque(range(-(-numel // _CHUNK)))
    num_threads = min(torch.get_num_threads(), len(queue) // 2)
    if num_threads <= 1:
        write(_taken(queue, numel, seed, own_generator(device, 0)), _PIECE)
        return
    errors: list[BaseException] = []
    is_inference, is_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def work(generator: torch.Generator) -> None:
        try:
            with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad):
                write(_taken(queue, numel, seed, generator), _CHUNK)
        except BaseException as error:  # noqa: BLE001  # See Rule 4
            errors.append(error)

    others = [
        threading.Thread(target=work, args=(own_generator(device, 0),), name="recoup-draws")
        for _ in range(num_threads - 1)
    ]
    started: list[threading.Thread] = []
    try:
        with suppress(RuntimeError):  # If no more threads can be started, fewer do the work.
            for thread in others:
                thread.start()
                started.append(thread)
        work(own_generator(device, 0))
    finally:
        queue.clear()
        for thread in started:
            thread.join()
    if errors:
        raise errors[0]


def _taken(queue: deque[int], numel: int, seed: int, generator: torch.Generator) -> _Chunks:
    while True:
        try:
            chunk = queue.popleft()
        except IndexError:
            return
        generator.manual_seed(hash_seed(seed, chunk))
        yield generator, chunk * _CHUNK, min((chunk + 1) * _CHUNK, numel)


# --- on a GPU ------------------------------------------------------------------------------------


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    """Return the kernels for `device`, if it is a GPU that they run on (See Rule 5)."""
    if device.type != "cuda":
        return None
    try:
        from recoup.weights import kernels

        kernels.write_scales(torch.empty(1, device=device), 0, 1, 1.0)
    except ImportError:
        return None
    except Exception as error:  # noqa: BLE001  # A compiler may raise any exception.
        warnings.warn(
            f"Triton is installed but does not run on {device}, so draws take more passes: {error}",
            stacklevel=2,
        )
        return None
    return kernels
