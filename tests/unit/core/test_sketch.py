"""Sketches: equal bits are equal, and what differs in one entry or in their order is told apart."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from recoup._core import sketch
from recoup._core.sketch import are_equal, difference, numbers_of, sketch_of

# One row is 16 entries, a block 4096; tensors of more than 32768 are read in blocks.
SIZES = [1, 16, 17, 4096, 32768, 32769, 34_833, 16 * 4096 + 5, 40 * 4096, 262_288]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.bool]


def values(size, dtype):
    torch.manual_seed(0)
    if dtype in INTEGERS:
        return torch.randint(0, 2, (size,)).to(dtype)
    return torch.randn(size, dtype=dtype)


def off(first, second):
    return difference(sketch_of(first), sketch_of(second)) / sketch.tolerance_of(first.dtype)


def changed(first, place):
    second = first.clone()
    second[place] = not first[place] if first.dtype is torch.bool else first[place] + 1
    return second


def swapped(first, one, other, values):
    first, second = first.clone(), first.clone()
    first[[one, other]] = torch.tensor(values).to(first.dtype)
    second[[one, other]] = first[[other, one]]
    return first, second


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, *INTEGERS])
@pytest.mark.parametrize("size", SIZES)
def test_one_entry_and_the_order_of_two_are_seen_and_rounding_is_not(size, dtype):
    first = values(size, dtype)
    assert numbers_of(sketch_of(first)) == numbers_of(sketch_of(first.clone()))
    for place in {0, size // 2, size - 1}:
        by = 1 / math.sqrt(size)  # which rounding to half precision may hide
        assert off(first, changed(first, place)) > 1 or by < 10 * sketch.tolerance_of(dtype)
    if dtype in INTEGERS:
        return
    for one, other in ((0, 1), (0, 16), (3, 4096), (20, 40000), (69999, 5), (5, 5 + 2**15)):
        if max(one, other) < size:
            assert off(*swapped(first, one, other, [40.0, -40.0])) > 1
    rounding = torch.finfo(dtype).eps * torch.randint(-1, 2, (size,)).to(first.real.dtype)
    assert off(first, first * (1 + rounding)) < 1


@pytest.mark.parametrize(("make", "size"), [
    *((sketch_of, size) for size in SIZES[2:]),
    *((sketch._sums_of_rows, size) for size in (32_769, 2**18 + 77)),
])  # fmt: skip
def test_the_length_of_a_difference(make, size):
    first, change = values(size, torch.float64), torch.randn(size, dtype=torch.float64)
    made = make(first)
    assert make is sketch_of or 64 < made.numel() < 2**14
    assert are_equal([(made, make(first.clone()))])
    for scale in (1e-6, 1e-2, 1.0):
        by = float(scale * change.norm() / first.norm())
        assert by / 3 < difference(made, make(first + scale * change)) < 3 * by
    for place in (0, size // 2, size - 1):
        second = make(changed(first, place))
        assert not are_equal([([1.0], [1.0]), (made, second)])
        assert 0.2 < difference(made, second) * math.sqrt(size) < 15


def test_constants():
    """Where entries are alike, a sketch may be far shorter than the tensor."""
    for number, size in product((0.0, -3.5, 1e-30, 1e30), (5, 4096, 70000)):
        first = torch.full((size,), number)
        second = torch.full((size,), 1.01 * number if number else 1e-6)
        assert off(first, second) > 1
        assert difference(sketch_of(first), sketch_of(second), 1e3 * float(second.norm())) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_any_place_in_memory(dtype):
    base = values(60 * 80, dtype).view(60, 80)
    for way in (
        torch.t, lambda x: x[1:, 3::2], lambda x: x[:, 5:6].expand(-1, 40),
        lambda x: x.clone().requires_grad_(dtype is not torch.int64),
        lambda x: torch._neg_view(x) if dtype.is_floating_point else -x,
        lambda x: torch.inference_mode()(x.clone)(),
    ):  # fmt: skip
        first = way(base)
        assert off(first, way(base.clone())) == 0
        assert off(first, way(base + (base == base[7, 5]).to(dtype))) > 1


def test_what_has_no_sketch_or_is_not_finite():
    """Where the first run has made it, nothing can be said; where the second has, it differs."""
    eye, nothing = torch.eye(3), torch.ones(3)
    nothing.untyped_storage().resize_(0)
    for tensor in (torch.empty(0, 4), eye.to_sparse(), eye.to("meta"), nothing):
        assert sketch_of(tensor) is None
    for size in (5, 70000):
        finite = values(size, torch.float32)
        for number in (math.nan, math.inf):
            other = finite.clone()
            other[3] = number
            assert off(other, finite) == off(other, other.clone()) == 0
            assert off(finite, other) == math.inf


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(("size", "first_at"), [(70_000, 3), (4096 * 80, 0), (2**19 + 4097, 3)])
def test_many_integers_are_told_apart(size, first_at, dtype):
    torch.manual_seed(0)
    least = 1 if dtype is torch.bool else torch.iinfo(dtype).min
    numbers = torch.randint(-100, 100, (size + first_at,)).to(dtype)[first_at:]
    assert off(numbers, numbers.clone()) == 0
    last = (size - 1, size // 2), (0, size - 1), (7, 15), (7, 231), (3, 77)  # the top of a word
    for one, other in ((0, 1), (1, 4096), (3, 3 * 4096), (5, 8 * 4096 + 5), *last):
        assert off(numbers, changed(numbers, one)) > 1
        for two in ([1, 0], [least, 0]):
            assert off(*swapped(numbers, one, other, two)) > 1
