"""Draws on a GPU: one kernel that reads a weight, draws, and writes the result.

Imports Triton, so `draws.py` imports it late. Without Triton the module can be imported (for its
documentation), and a call is an ImportError. Bits come from Triton's Philox, whose counter is the
place of the entries: four words of 32 bits a count.
"""

# pyright: basic, reportMissingImports=false
# pyright: reportInvalidTypeForm=false, reportOptionalMemberAccess=false
# ruff: noqa: ANN001, ANN202
# Triton has no types, is None where it is not installed, and reads annotations itself.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["add_noise", "drop", "write_scales"]

_NUM_COUNTS = 512  # in a program of four warps
# Else Triton compiles a kernel again, during training, for a seed that is a multiple of 16.
_NUMBERS = ("num_units", "seed", "num_dropped")
# Noise is a product. Fused with the addition, it would differ from noise added to zeros.
_EXACTLY = {"enable_fp_fusion": False}


def drop(weight: Tensor, out: Tensor, seed: int, num_dropped: int, scale: float) -> None:
    """Write `weight` times a mask to `out`, which may be `weight`; both are contiguous."""
    _launch(_drop, 8, weight, out, seed, num_dropped, scale, True)


def write_scales(out: Tensor, seed: int, num_dropped: int, scale: float) -> None:
    """Write a mask to `out`, which is contiguous."""
    _launch(_drop, 8, out, out, seed, num_dropped, scale, False)


def add_noise(weight: Tensor, out: Tensor, seed: int, std: float) -> None:
    """Write `weight` and noise to `out`, which may be `weight`; both are contiguous."""
    num_each = 2 if out.dtype is torch.float64 else 4
    _launch(_add_noise, num_each, weight, out, seed, std)


def _jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return ``triton.jit``, which compiles a function at its first launch."""
    return (lambda function: function) if triton is None else triton.jit(**options)


def _launch(kernel: Any, num_each: int, weight: Tensor, out: Tensor, *args: Any) -> None:
    if triton is None:
        raise ImportError("The kernels of recoup.weights need triton: `pip install triton`.")
    numel = out.numel()
    if numel == 0:
        return
    # From `num_units * 16` Triton sees that a number is a multiple of 16: a thread then loads and
    # stores 16 bytes at once.
    unit = 16 if numel % 16 == 0 else 1
    grid = (-(-numel // (num_each * _NUM_COUNTS)),)
    with torch.cuda.device_of(out):  # Triton launches on the current device.
        kernel[grid](weight, out, numel // unit, *args, unit, _NUM_COUNTS, **_EXACTLY)


@_jit(do_not_specialize=_NUMBERS)
def _drop(
    weight,
    out,
    num_units,
    seed: tl.int64,
    num_dropped,
    scale: tl.float64,
    MULTIPLIES: tl.constexpr,
    UNIT: tl.constexpr,
    NUM_COUNTS: tl.constexpr,
):
    numel = num_units.to(tl.int64) * UNIT
    scale = tl.full([], scale, out.dtype.element_ty)
    program = tl.program_id(0)
    count = tl.arange(0, NUM_COUNTS)
    a, b, c, d = tl.randint4x(seed, program * NUM_COUNTS + count)
    place = program.to(tl.int64) * (8 * NUM_COUNTS) + 4 * count
    _drop_four(weight, out, place, numel, a, b, num_dropped, scale, MULTIPLIES)
    place += 4 * NUM_COUNTS
    _drop_four(weight, out, place, numel, c, d, num_dropped, scale, MULTIPLIES)


@_jit()
def _drop_four(weight, out, place, numel, a, b, num_dropped, scale, MULTIPLIES: tl.constexpr):
    kind = out.dtype.element_ty
    # A thread owns four entries that lie side by side, and the words they come from.
    lane = tl.arange(0, 4)[None, :]
    word = tl.where(lane < 2, a[:, None], b[:, None])
    bits = (word >> (16 * (lane % 2)).to(word.dtype)).to(tl.int32) & 0xFFFF
    value = tl.where(bits >= num_dropped, scale, 0.0).to(kind)
    place = place[:, None] + lane
    inside = place < numel
    if MULTIPLIES:
        raw = tl.load(weight + place, mask=inside)
        if kind == tl.float64:
            value = raw * value
        else:
            value = (raw.to(tl.float32) * value.to(tl.float32)).to(kind)
    tl.store(out + place, value, mask=inside)


@_jit(do_not_specialize=_NUMBERS)
def _add_noise(
    weight,
    out,
    num_units,
    seed: tl.int64,
    std: tl.float64,
    UNIT: tl.constexpr,
    NUM_COUNTS: tl.constexpr,
):
    numel = num_units.to(tl.int64) * UNIT
    program = tl.program_id(0)
    count = tl.arange(0, NUM_COUNTS)
    a, b, c, d = tl.randint4x(seed, program * NUM_COUNTS + count)
    if out.dtype.element_ty == tl.float64:
        place = program.to(tl.int64) * (2 * NUM_COUNTS) + count
        radius = ((a.to(tl.uint64) << 32) | b).to(tl.int64, bitcast=True) | 1
        angle = ((c.to(tl.uint64) << 32) | d).to(tl.int64, bitcast=True)
        step = 1.0842021724855044e-19  # 2 ** -63
        first, second = _normals(radius.to(tl.float64) * step, angle.to(tl.float64) * step, std)
        _add(weight, out, place, numel, first)
        _add(weight, out, place + NUM_COUNTS, numel, second)
    else:
        place = program.to(tl.int64) * (4 * NUM_COUNTS) + count
        first, second = _normals(_number(a | 1), _number(b), std)
        _add(weight, out, place, numel, first)
        _add(weight, out, place + NUM_COUNTS, numel, second)
        first, second = _normals(_number(c | 1), _number(d), std)
        _add(weight, out, place + 2 * NUM_COUNTS, numel, first)
        _add(weight, out, place + 3 * NUM_COUNTS, numel, second)


@_jit()
def _number(word):
    """Return a number from -1 to 1."""
    return word.to(tl.int32, bitcast=True).to(tl.float32) * 4.656612873077393e-10  # 2 ** -31


@_jit()
def _normals(radius, angle, std):
    """Return two normals by Box and Muller's method; `radius` must not be zero."""
    radius = tl.sqrt(tl.log(tl.abs(radius)) * -2.0) * tl.full([], std, radius.dtype)
    angle *= 3.141592653589793
    return radius * tl.cos(angle), radius * tl.sin(angle)


@_jit()
def _add(weight, out, place, numel, noise):
    kind = out.dtype.element_ty
    inside = place < numel
    raw = tl.load(weight + place, mask=inside).to(noise.dtype)
    # Rounded before it is added, so that it makes no difference whether it is added to zeros first.
    noise = noise.to(kind).to(noise.dtype)
    tl.store(out + place, (raw + noise).to(kind), mask=inside)
