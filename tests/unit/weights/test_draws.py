"""From a seed to a mask or to noise: what the numbers are, and what they depend on.

A weight is drawn in chunks of 131072 entries; the table of an embedding by row, so that a few rows
can be drawn alone. What both are is computed here a second time, without threads and pieces.
"""

from __future__ import annotations

import hashlib
import random
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import recoup
from recoup.weights import Draw, same_draw
from tests.chance import are_even, are_gaussian, has_share
from tests.weight_zoo import Reads

CHUNK, PIECE, MASK_64 = 2**17, 2**15, 2**64 - 1
STEP = 0x9E3779B97F4A7C15
SEEDS = (0, 1, 2**40 + 3, 2**63 - 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture
def threads():
    """Set the number of threads, for this test alone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# -- what an entry is ------------------------------------------------------------------------------


def split_mix(number):
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK_64
    return number ^ (number >> 31)


def hash_of(*numbers):
    found = 0
    for number in numbers:
        found = split_mix((found + number + STEP) & MASK_64)
    return found


def seed_of(seed, name):
    """The seed of what is drawn for a name, in a step of a seed."""
    text = f"{seed} {name} 0".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def chunks_of(numel, seed):
    for chunk, start in enumerate(range(0, numel, CHUNK)):
        generator = torch.Generator().manual_seed(hash_of(seed, chunk))
        yield min(CHUNK, numel - start), generator


def bits_for(p):
    """How many bits say whether an entry is kept: 8 where that is exact."""
    return 8 if p * 256 == int(p * 256) else 16


def kept_by(words, p):
    """Whether the entries that the bits of some words stand for are kept."""
    num_bits = bits_for(p)
    lanes = [(words >> shift) & (2**num_bits - 1) for shift in range(0, 64, num_bits)]
    return (torch.stack(lanes, -1) ^ 2 ** (num_bits - 1)).flatten(-2) >= round(p * 2**num_bits)


def read(module, seed):
    """The weight of a module in a step of a seed; of an embedding, by rows. No state moves."""
    given = () if isinstance(module, Reads) else (torch.arange(module.num_embeddings),)
    with same_draw(seed), torch.no_grad():
        before, stream = random.getstate(), torch.get_rng_state()
        found = module(*given)
    assert torch.equal(torch.get_rng_state(), stream)
    assert random.getstate() == before
    return found


def weight(value, *shape, dtype=torch.float32):
    return Reads(torch.full(shape, value, dtype=dtype))


def table(value, *shape, dtype=torch.float32):
    return nn.Embedding(*shape, _weight=torch.full(shape, value, dtype=dtype))


def mask(seed, p, *shape, build=weight, dtype=torch.float32):
    return read(recoup.weight_dropout(build(1.0, *shape, dtype=dtype), p=p), seed)


def noise(seed, *shape, build=weight, dtype=torch.float32):
    return read(recoup.weight_noise(build(0.0, *shape, dtype=dtype), std=1.0), seed)


def assert_mask(found, is_kept, p):
    """Zero, or so large that the mean stays."""
    scale = torch.tensor(1 / (1 - round(p * 65536) / 65536)).to(found.dtype)
    want = torch.where(is_kept, scale, torch.zeros_like(scale))
    torch.testing.assert_close(found, want, rtol=1e-6, atol=0)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("numel", [1, 5, 4096, PIECE + 1, CHUNK + 3, 2**19 + 5])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.3, 1 / 65536, 0.5, 255 / 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_are_what_the_note_says(dtype, p, seed, numel):
    is_kept = []
    for size, generator in chunks_of(numel, seed_of(seed, "weight weight_dropout")):
        words = torch.empty(-(-size * bits_for(p) // 64), dtype=torch.int64)
        words.random_(-(2**63), None, generator=generator)
        is_kept.append(kept_by(words, p)[:size])
    assert_mask(mask(seed, p, numel, dtype=dtype), torch.cat(is_kept), p)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("numel", [1, 17, 4096, PIECE + 5, CHUNK + 3, 2**19 + 16])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_noise_is_what_the_note_says(numel, seed, dtype):
    pieces = []
    for size, generator in chunks_of(numel, seed_of(seed, "weight weight_noise")):
        for start in range(0, size, PIECE):
            piece = torch.empty(min(PIECE, size - start), dtype=dtype)
            pieces.append(piece.normal_(0.0, 1.0, generator=generator))
    assert torch.equal(noise(seed, numel, dtype=dtype), torch.cat(pieces))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 8, 13, 64])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.3, 0.5, 65535 / 65536])
def test_masks_of_tables_are_what_the_note_says(p, seed, width, dtype):
    num_words = -(-width * bits_for(p) // 64)
    start = hash_of(seed_of(seed, "weight weight_dropout"))
    numbers = [split_mix((start + place * STEP) & MASK_64) for place in range(5 * num_words)]
    words = torch.tensor([n - 2**64 if n >= 2**63 else n for n in numbers]).view(5, num_words)
    found = mask(seed, p, 5, width, build=table, dtype=dtype)
    assert_mask(found, kept_by(words, p)[:, :width], p)


def test_noise_of_tables_is_what_the_note_says():
    start = hash_of(seed_of(7, "weight weight_noise"))
    words = [split_mix((start + place * STEP) & MASK_64) for place in range(40)]
    halves = torch.tensor([[n & (2**32 - 1), n >> 32] for n in words], dtype=torch.float64)
    numbers = (halves + 2**31).remainder(2**32)  # as signed integers, from the least
    want = torch.special.ndtri((numbers + 0.5) / 2**32).view(5, 16)
    assert torch.equal(noise(7, 5, 16, build=table, dtype=torch.float64), want)


# -- what a draw depends on, and what not ----------------------------------------------------------

SHAPES = [(), (1,), (3, 5), (64, 64), (190, 211), (701, 803)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", [1e-9, 0.3, 0.5, 65535 / 65536, 1.0])
def test_a_draw_scales_or_is_added_to_any_weight_alike(shape, dtype, p):
    """So it is its own transpose; and noise is rounded to the type of the weight before."""
    raw = torch.randn(shape, dtype=torch.float64).to(dtype)
    for apply, start, combine in (
        (lambda m: recoup.weight_dropout(m, p=p), 1.0, torch.mul),
        (lambda m: recoup.weight_noise(m, std=p), 0.0, torch.add),
    ):
        module = apply(weight(start, *shape, dtype=dtype))
        drawn = read(module, 11)
        module.get_parameter("weight").data.copy_(raw)
        found = read(module, 11)
        assert torch.equal(found, combine(raw, drawn))
        assert found.dtype is dtype
        assert found.is_contiguous()
        assert drawn.isfinite().all()
        assert torch.equal(module.get_parameter("weight"), raw)


def draws_of_all_kinds(shape=(701, 803)):
    """Masks and noise, of a weight of several pieces and of a table."""
    masks = [mask(6, 0.3, *shape, build=build) for build in (weight, table)]
    double = noise(6, *shape, dtype=torch.float64)
    normals = [noise(6, *shape, build=build) for build in (weight, table)]
    return [*masks, double, *normals, Draw(torch.zeros(shape, dtype=torch.float32), 6).uniform()]


@contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "setting", [nullcontext, default_dtype, torch.inference_mode, partial(torch.autocast, "cpu")]
)
@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_and_settings_of_torch_make_no_difference(threads, num_threads, setting):
    threads(1)
    want = draws_of_all_kinds()
    threads(num_threads)
    with setting():
        assert all(map(torch.equal, draws_of_all_kinds(), want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("apply", [recoup.weight_dropout, recoup.weight_noise])
@pytest.mark.parametrize("build", [lambda: weight(1.0, 2**21), lambda: table(1.0, 2**15, 64)])
def test_no_buffer_is_as_large_as_a_large_weight(threads, build, apply, dtype):
    threads(1)  # bytes are counted in one
    module = apply(build().to(dtype))

    num_bytes = module.get_parameter("weight").nbytes

    def draw():
        with recoup.weights.step(module), torch.no_grad():
            return module.weight

    measured = recoup.measure(draw, repeats=0)
    assert num_bytes <= measured.peak_bytes <= num_bytes * 1.35


# -- the draw of a function of a user's ------------------------------------------------------------


MAKES = [Draw.normal, Draw.uniform, lambda draw, shape=None: draw.bernoulli(0.3, shape)]


@pytest.mark.parametrize("make", MAKES)
def test_a_draw_is_the_same_for_a_seed_and_another_in_each_call(make):
    zeros = torch.zeros(300, 200)
    one, two = Draw(zeros, 5), Draw(zeros, 5)
    first = make(one)
    assert torch.equal(first, make(two))
    assert not torch.equal(first, make(one))
    assert not torch.equal(first, make(Draw(zeros, 6)))
    assert (first.shape, first.dtype) == (zeros.shape, zeros.dtype)
    low = make(Draw(zeros.bfloat16(), 5), (3, 2))
    assert (low.shape, low.dtype) == ((3, 2), torch.bfloat16)


def test_draws_have_their_distributions():
    draw = Draw(torch.zeros(400, 1000), 3)
    normal, uniform, bernoulli = draw.normal(), draw.uniform(), draw.bernoulli(0.3)
    assert are_gaussian(normal.flatten())
    assert are_even(torch.histc(uniform, 256, 0, 1))
    assert 0 <= float(uniform.min()) < float(uniform.max()) <= 1
    assert set(bernoulli.unique().tolist()) == {0.0, 1.0}
    assert has_share(bernoulli == 1, 1 - round(0.7 * 65536) / 65536)
    assert draw.bernoulli(0.0).sum() == 0
    assert draw.bernoulli(1.0, (7,)).sum() == 7
