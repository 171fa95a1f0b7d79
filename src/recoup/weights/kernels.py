"""The draws of `draws.py` on a GPU: one kernel that reads a weight, draws, and writes the result.

Imports Triton, so `draws.py` imports it late. What an entry is, is said there and done twice, with
torch's operators and here: masks come out the same bit for bit, noise the same up to rounding.
"""

# pyright: basic, reportMissingImports=false
# ruff: noqa: ANN001, ANN202
# Triton has no types, is not installed where there is no GPU, and reads annotations itself.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_noise", "drop", "write_scales"]

# As in `draws.py`, but signed.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_SECOND = tl.constexpr(0x94D049BB133111EB - 2**64)
_THIRD = tl.constexpr(0x6A09E667F3BCC909)

_NUM_EACH = 512  # numbers that are hashed, or pairs of normals, in a program
# Else a kernel is compiled again, in the middle of training, for a seed that divides by 16.
_NUMBERS = ("num_units", "key", "num_dropped")
# Noise is a product. Fused with the addition, it would not be what it is when added to zeros.
_EXACTLY = {"enable_fp_fusion": False}


def drop(weight: Tensor, out: Tensor, key: int, num_dropped: int, scale: float) -> None:
    """Write `weight` times a mask to `out`, which may be `weight`; both are contiguous."""
    _launch(_drop, -(-out.numel() // 8), weight, out, key, num_dropped, scale, True)


def write_scales(out: Tensor, key: int, num_dropped: int, scale: float) -> None:
    """Write a mask to `out`, which is contiguous."""
    _launch(_drop, -(-out.numel() // 8), out, out, key, num_dropped, scale, False)


def add_noise(weight: Tensor, out: Tensor, key: int, std: float) -> None:
    """Write `weight` and noise to `out`, which may be `weight`; both are contiguous."""
    _launch(_add_noise, -(-out.numel() // 2), weight, out, key, std)


def _launch(kernel: Any, num: int, weight: Tensor, out: Tensor, *args: Any) -> None:
    numel = out.numel()
    if numel == 0:
        return
    unit = 16 if numel % 16 == 0 else 1
    with torch.cuda.device_of(out):  # Triton launches on the current device.
        kernel[(-(-num // _NUM_EACH),)](
            weight, out, numel // unit, *args, unit, _NUM_EACH, **_EXACTLY
        )


@triton.jit
def _first_word(number):
    x = number * _GOLDEN
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x + (x >> 32)


@triton.jit
def _second_word(first):
    x = (first ^ (first >> 29)) * _THIRD
    return x + (x >> 32)


@triton.jit
def _drop_entries(weight, out, word, scale, num_dropped, begin, end, MULTIPLIES: tl.constexpr):
    kind = out.dtype.element_ty
    lane = tl.arange(0, 4)[None, :]
    place = begin[:, None] + lane
    inside = place < end
    bits = (word[:, None] >> (16 * lane)) & 0xFFFF
    # Bits are compared as signed ones are.
    value = tl.where((bits ^ 0x8000) >= num_dropped, scale, 0.0).to(kind)
    if MULTIPLIES:
        raw = tl.load(weight + place, mask=inside)
        if kind == tl.float64:
            value = raw * value
        else:
            value = (raw.to(tl.float32) * value.to(tl.float32)).to(kind)
    tl.store(out + place, value, mask=inside)


@triton.jit(do_not_specialize=_NUMBERS)
def _drop(
    weight,
    out,
    num_units,
    key,
    num_dropped,
    scale: tl.float64,
    MULTIPLIES: tl.constexpr,
    UNIT: tl.constexpr,
    NUM_WORDS: tl.constexpr,
):
    numel = num_units.to(tl.int64) * UNIT
    scale = tl.full([], scale, out.dtype.element_ty)
    # A thread owns four entries that lie side by side, and the word they come from.
    number = tl.program_id(0).to(tl.int64) * NUM_WORDS + tl.arange(0, NUM_WORDS)
    half = tl.cdiv(numel, 8) * 4
    first = _first_word(key + number)
    end = half if UNIT == 16 else tl.minimum(half, numel)
    _drop_entries(weight, out, first, scale, num_dropped, 4 * number, end, MULTIPLIES)
    second = _second_word(first)
    begin = half + 4 * number
    _drop_entries(weight, out, second, scale, num_dropped, begin, numel, MULTIPLIES)


@triton.jit(do_not_specialize=_NUMBERS)
def _add_noise(
    weight,
    out,
    num_units,
    key,
    std: tl.float64,
    UNIT: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
):
    kind = out.dtype.element_ty
    numel = num_units.to(tl.int64) * UNIT
    half = num_units.to(tl.int64) * 8 if UNIT == 16 else tl.cdiv(numel, 2)
    pair = tl.program_id(0).to(tl.int64) * NUM_PAIRS + tl.arange(0, NUM_PAIRS)
    if kind == tl.float64:
        first = _first_word(key + pair) | 1
        radius = tl.abs(first.to(tl.float64)) * 1.0842021724855044e-19  # 2 ** -63
        angle = _second_word(first).to(tl.float64) * 3.4061215800865545e-19  # pi / 2 ** 63
    else:
        first = _first_word(key + (pair >> 1)) | 0x100000001
        shift = 32 * (pair & 1)
        radius = tl.abs((first >> shift).to(tl.int32).to(tl.float32)) * 4.656612873077393e-10
        angle = (_second_word(first) >> shift).to(tl.int32).to(tl.float32) * 1.4629180792671596e-09
    radius = tl.sqrt(tl.log(radius) * -2.0) * tl.full([], std, radius.dtype)
    _add_entries(weight, out, pair, half, radius * tl.cos(angle))
    _add_entries(weight, out, half + pair, numel, radius * tl.sin(angle))


@triton.jit
def _add_entries(weight, out, place, end, noise):
    kind = out.dtype.element_ty
    inside = place < end
    raw = tl.load(weight + place, mask=inside).to(noise.dtype)
    # Rounded before it is added, so that it makes no difference whether it is added to zeros first.
    noise = noise.to(kind).to(noise.dtype)
    tl.store(out + place, (raw + noise).to(kind), mask=inside)
