"""From a seed to a mask or to noise: what the numbers are, and what they depend on.

A weight is drawn in chunks of 131072 entries; the table of an embedding by row, so that a few rows
can be drawn alone. What both are is computed here a second time, without threads and pieces.
"""

from __future__ import annotations

import hashlib
import random

import pytest
import torch
from torch import nn

import recoup
from recoup.weights import Draw, same_draw
from tests.chance import are_even, are_gaussian, has_share

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
    """The weight of a module in a step of a seed."""
    with same_draw(seed), torch.no_grad():
        return (
            module() if isinstance(module, Reads) else module(torch.arange(module.num_embeddings))
        )


class Reads(nn.Module):
    """A forward that returns its weight."""

    def __init__(self, value, *shape, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, value, dtype=dtype))

    def forward(self):
        return self.weight * 1


def table(value, num_rows, width, dtype=torch.float32):
    """An embedding, all of one value."""
    return nn.Embedding(num_rows, width, _weight=torch.full((num_rows, width), value, dtype=dtype))


def mask(numel, seed, p, dtype=torch.float32):
    return read(recoup.weight_dropout(Reads(1.0, numel, dtype=dtype), p=p), seed)


def noise(numel, seed, dtype=torch.float32, std=1.0):
    return read(recoup.weight_noise(Reads(0.0, numel, dtype=dtype), std=std), seed)


def row_mask(num_rows, width, seed, p, dtype=torch.float32):
    return read(recoup.weight_dropout(table(1.0, num_rows, width, dtype), p=p), seed)


def row_noise(num_rows, width, seed, dtype=torch.float32):
    return read(recoup.weight_noise(table(0.0, num_rows, width, dtype), std=1.0), seed)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("numel", [1, 5, 4096, PIECE + 1, CHUNK + 3, 2**19 + 5])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.3, 1 / 65536, 0.5, 255 / 256])
def test_masks_are_what_the_note_says(numel, seed, p):
    is_kept = []
    for size, generator in chunks_of(numel, seed_of(seed, "weight weight_dropout")):
        words = torch.empty(-(-size * bits_for(p) // 64), dtype=torch.int64)
        words.random_(-(2**63), None, generator=generator)
        is_kept.append(kept_by(words, p)[:size])
    found = mask(numel, seed, p)
    assert torch.equal(found != 0, torch.cat(is_kept))
    assert not found.any() or found.max().item() == pytest.approx(
        1 / (1 - round(p * 65536) / 65536)
    )


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
    assert torch.equal(noise(numel, seed, dtype), torch.cat(pieces))


@pytest.mark.parametrize("width", [1, 3, 8, 13, 64])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.3, 0.5, 65535 / 65536])
def test_masks_of_tables_are_what_the_note_says(width, seed, p):
    found, num_words = row_mask(5, width, seed, p), -(-width * bits_for(p) // 64)
    start = hash_of(seed_of(seed, "weight weight_dropout"))
    numbers = [split_mix((start + place * STEP) & MASK_64) for place in range(5 * num_words)]
    words = torch.tensor([n - 2**64 if n >= 2**63 else n for n in numbers]).view(5, num_words)
    assert torch.equal(found != 0, kept_by(words, p)[:, :width])


def test_noise_of_tables_is_what_the_note_says():
    start = hash_of(seed_of(7, "weight weight_noise"))
    words = [split_mix((start + place * STEP) & MASK_64) for place in range(40)]
    halves = torch.tensor([[n & (2**32 - 1), n >> 32] for n in words], dtype=torch.float64)
    numbers = (halves + 2**31).remainder(2**32)  # as signed integers, from the least
    want = torch.special.ndtri((numbers + 0.5) / 2**32).view(5, 16)
    assert torch.equal(row_noise(5, 16, 7, torch.float64), want)


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
        module = apply(Reads(start, *shape, dtype=dtype))
        drawn = read(module, 11)
        module.get_parameter("weight").data.copy_(raw)
        found = read(module, 11)
        assert torch.equal(found, combine(raw, drawn))
        assert found.dtype is dtype
        assert found.is_contiguous()
        assert drawn.isfinite().all()
        assert torch.equal(module.get_parameter("weight"), raw)


def draws_of_all_kinds(num_rows=701, width=803):
    """Masks and noise, of a weight of several pieces and of a table."""
    return [
        mask(num_rows * width, 6, 0.3),
        noise(num_rows * width, 6),
        noise(num_rows * width, 6, torch.float64),
        row_mask(num_rows, width, 6, 0.3),
        row_noise(num_rows, width, 6),
        Draw(torch.zeros(num_rows, width, dtype=torch.float32), 6).uniform(),
    ]


def test_threads_and_settings_of_torch_make_no_difference(threads):
    threads(1)
    want = draws_of_all_kinds()

    def with_default_dtype():
        torch.set_default_dtype(torch.float64)
        try:
            return draws_of_all_kinds()
        finally:
            torch.set_default_dtype(torch.float32)

    found = []
    for num_threads in (2, 3):
        threads(num_threads)
        found += draws_of_all_kinds()
    found += with_default_dtype()
    with torch.inference_mode():
        found += draws_of_all_kinds()
    with torch.autocast("cpu", torch.bfloat16):
        found += draws_of_all_kinds()
    for place, value in enumerate(found):
        assert torch.equal(value, want[place % len(want)])


@pytest.mark.parametrize("numel", [4096, 2**19])
def test_the_type_does_not_change_which_entries_are_dropped(numel):
    kept = mask(numel, 6, 0.3) != 0
    rows = row_mask(numel // 64, 64, 6, 0.3) != 0
    for dtype in DTYPES:
        assert torch.equal(mask(numel, 6, 0.3, dtype) != 0, kept)
        assert torch.equal(row_mask(numel // 64, 64, 6, 0.3, dtype) != 0, rows)
        scale = torch.tensor(65536 / (65536 - 19661)).to(dtype).item()
        found = {
            mask(numel, 6, 0.3, dtype).max().item(),
            row_mask(4, 64, 6, 0.3, dtype).max().item(),
        }
        assert found == {scale} or found == {65536 / (65536 - 19661)}


def test_a_draw_repeats_for_its_seed_and_moves_no_random_state():
    state, python = torch.get_rng_state(), random.getstate()
    layers = [recoup.weight_noise(recoup.weight_dropout(Reads(1.0, 2**n))) for n in (12, 17)]
    found = []
    for seed in (*SEEDS, *SEEDS):
        with same_draw(seed):
            stream = torch.get_rng_state()
            found.append([layer().detach() for layer in layers])
            assert torch.equal(torch.get_rng_state(), stream)
    assert random.getstate() == python
    assert not torch.equal(state, stream)  # `same_draw` moves it, so that it would be seen
    for i in range(8):
        for j in range(i):
            for a, b in zip(found[i], found[j], strict=True):
                assert torch.equal(a, b) == (i - j == 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("apply", [recoup.weight_dropout, recoup.weight_noise])
@pytest.mark.parametrize("build", [lambda: Reads(1.0, 2**21), lambda: table(1.0, 2**15, 64)])
def test_no_buffer_is_as_large_as_a_large_weight(threads, build, apply, dtype):
    threads(1)  # bytes are counted in one
    module = apply(build().to(dtype))

    def draw():
        with recoup.weights.step(module), torch.no_grad():
            return module.weight

    num_bytes = module.get_parameter("weight").nbytes
    measured = recoup.measure(draw, repeats=0)
    assert num_bytes <= measured.peak_bytes <= num_bytes * 1.35


@pytest.mark.parametrize("shape", [(64, 64), (701, 803)], ids=str)
def test_on_meta_there_is_a_shape(shape):
    with torch.device("meta"):
        for module in (Reads(1.0, *shape), nn.Embedding(*shape)):
            recoup.weight_noise(recoup.weight_dropout(module))
            given = () if isinstance(module, Reads) else (torch.arange(shape[0]),)
            found = module(*given)
            assert found.is_meta
            assert found.shape == shape


# -- the draw of a function of a user's ------------------------------------------------------------


def test_a_draw_is_the_same_for_a_seed_and_another_in_each_call():
    zeros = torch.zeros(300, 200)
    for make in (Draw.normal, Draw.uniform, lambda draw: draw.bernoulli(0.3)):
        one, two = Draw(zeros, 5), Draw(zeros, 5)
        first = make(one)
        assert torch.equal(first, make(two))
        assert not torch.equal(first, make(one))
        assert not torch.equal(first, make(Draw(zeros, 6)))
        assert (first.shape, first.dtype) == (zeros.shape, zeros.dtype)
    draw = Draw(zeros.bfloat16(), 5)
    assert draw.uniform((3,)).dtype is torch.bfloat16
    assert draw.normal((2, 2)).shape == (2, 2)


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
    for p in (1.5, -0.1):
        with pytest.raises(ValueError, match=rf"`p` is {p}, but must be a probability"):
            draw.bernoulli(p)
    with pytest.raises(ValueError, match=r"`weight` is torch.int64, but must be of a floating"):
        Draw(torch.arange(3), 3)
