"""From a seed to a dropped or noisy weight: what a mask and noise are, and what they depend on."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import recoup
from recoup.weights import draws
from tests.chance import are_even, are_gaussian, are_uncorrelated, has_share


def dropped_(w, *args):
    return (
        w.copy_(draws.dropped(w, *args))
        if not w.is_contiguous()
        else draws.dropped(w, *args, out=w)
    )


def noised_(w, *args):
    return (
        w.copy_(draws.noised(w, *args)) if not w.is_contiguous() else draws.noised(w, *args, out=w)
    )


CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# One piece, several, and as many chunks as two threads need; ends that fill no word of 64 bits.
SHAPES = ((), (0,), (1,), (3, 5), (64, 64), (190, 211), (701, 803))
SMALL_AND_LARGE = ((64, 64), (701, 803))
SEEDS = (0, 1, 2**40 + 3, 2**63 - 1)
CHUNK, MASK_64 = 2**17, 2**64 - 1


def mask(shape, seed, p, dtype=torch.float32):
    return draws.scales(shape, seed, p, dtype=dtype, device=CPU)


def normals(numel, seed, dtype=torch.float32):
    return noised_(torch.zeros(numel, dtype=dtype), seed, 1.0)


def weight(shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.fixture
def threads():
    """Set the number of threads, for this test alone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# --- what an entry is, told a second time without threads or pieces ------------------------------


def chunk_seed(seed, chunk):
    """Two steps of SplitMix64."""
    x = seed
    for number in (0, chunk):
        x = (x + number + 0x9E3779B97F4A7C15) & MASK_64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
        x ^= x >> 31
    return x


def chunks_of(numel, seed):
    for chunk, start in enumerate(range(0, numel, CHUNK)):
        yield (
            min(CHUNK, numel - start),
            torch.Generator().manual_seed(chunk_seed(seed, chunk)),
        )


@pytest.mark.sampled(15)
@pytest.mark.parametrize("numel", [1, 5, 4096, 2**15 + 1, CHUNK + 3, 2**19 + 5])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.3, 1 / 65536, 0.5, 255 / 256])
def test_masks_are_what_the_note_says(numel, seed, p):
    is_kept = []
    for size, generator in chunks_of(numel, seed):
        num_bits = 8 if p * 256 == int(p * 256) else 16
        words = torch.empty(-(-size * num_bits // 64), dtype=torch.int64)
        words.random_(-(2**63), None, generator=generator)
        least, sign = round(p * 2**num_bits), 2 ** (num_bits - 1)
        bits = [(words >> shift) & (2**num_bits - 1) for shift in range(0, 64, num_bits)]
        is_kept.append((torch.stack(bits, 1) ^ sign).flatten()[:size] >= least)
    assert torch.equal(mask((numel,), seed, p) != 0, torch.cat(is_kept))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("numel", [1, 17, 4096, 2**15 + 5, CHUNK + 3, 2**19 + 16])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_noise_is_what_the_note_says(numel, seed, dtype):
    pieces = []
    for size, generator in chunks_of(numel, seed):
        for start in range(0, size, 2**15):
            piece = torch.empty(min(2**15, size - start), dtype=dtype)
            pieces.append(piece.normal_(0.0, 1.0, generator=generator))
    assert torch.equal(normals(numel, seed, dtype), torch.cat(pieces))


# --- the laws between the functions --------------------------------------------------------------


@pytest.mark.sampled(26)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 1e-9, 0.3, 0.5, 65535 / 65536, 1.0])
def test_dropped_is_weight_times_scales(shape, dtype, p):
    w = weight(shape, dtype)
    raw = w.clone()
    found = draws.dropped(w, 11, p)
    assert torch.equal(found, w * mask(shape, 11, p, dtype))
    assert found.shape == w.shape
    assert found.dtype is dtype
    assert found.is_contiguous()
    assert not found.isnan().any()
    assert torch.equal(w, raw)
    assert found is not w
    assert dropped_(w, 11, p) is w
    assert torch.equal(w, found)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_noised_is_weight_plus_noise(shape, dtype):
    w = weight(shape, dtype)
    raw = w.clone()
    found = draws.noised(w, 11, 0.1)
    assert torch.equal(found, w + noised_(torch.zeros_like(w), 11, 0.1))
    noise = draws.noise_beside(w, 11, 0.1)
    assert (noise is None) == (w.numel() > 2**15)
    assert noise is None or torch.equal(found, w + noise)
    assert found.shape == w.shape
    assert found.dtype is dtype
    assert found.is_contiguous()
    assert torch.equal(w, raw)
    assert noised_(w, 11, 0.1) is w
    assert torch.equal(w, found)
    assert torch.equal(draws.noised(raw, 11, 0.0), raw)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((600, 700), (1,)),
        ((600, 700), (0,)),
        ((600, 700), (0, 1)),
        ((600, 1), (1,)),
        ((700, 4, 300), (1,)),
        ((700, 4, 300), (0, 2)),
        ((8, 3, 5, 5), (2, 3)),
    ],
)
def test_entries_are_dropped_together_along_axes(shape, axes):
    w = weight(shape)
    small = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    shared = mask(small, 4, 0.4)
    found = draws.dropped(w, 4, 0.4, axes)
    assert torch.equal(found, w * shared)
    assert torch.equal(dropped_(w.clone(), 4, 0.4, axes), found)
    w_t = w.transpose(0, -1).contiguous().transpose(0, -1)
    assert torch.equal(draws.dropped(w_t, 4, 0.4, axes), found)


def test_a_mask_depends_on_the_number_of_entries_only():
    # A row mask of an embedding is asked for with and without the axis along which it is shared.
    for numel in (1000, 2**18 + 7):
        assert torch.equal(mask((numel, 1), 8, 0.5).flatten(), mask((numel,), 8, 0.5))


@pytest.mark.parametrize("num_rows", [30, 700])
@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.t(),
        lambda w: w[::2, 1::3],
        lambda w: w.unflatten(1, (2, -1)).permute(1, 2, 0),
        lambda w: w[:, :1].expand(-1, 900),
        lambda w: w[3:],
    ],
    ids=["transposed", "strided", "permuted", "expanded", "sliced"],
)
def test_layout_makes_no_difference(num_rows, view):
    w = view(weight((num_rows, 1000)))
    dense = w.clone(memory_format=torch.contiguous_format)
    for draw in (
        lambda w: draws.dropped(w, 9, 0.3),
        lambda w: draws.noised(w, 9, 0.3),
    ):
        found = draw(w)
        assert found.is_contiguous()
        assert torch.equal(found, draw(dense))


@pytest.mark.parametrize("num_rows", [30, 700])
@pytest.mark.parametrize("draw", [dropped_, noised_])
def test_in_place_writes_through_views_and_nowhere_else(num_rows, draw):
    w = weight((num_rows, 1000))
    expected = w.clone()
    part = expected[::2, 1::3]
    part.copy_(draw(part.contiguous(), 9, 0.3))
    draw(w[::2, 1::3], 9, 0.3)
    assert torch.equal(w, expected)
    with pytest.raises(RuntimeError, match="single memory location"):
        draw(w[:, :1].expand(-1, 900), 9, 0.3)


# --- what a draw depends on, and what not --------------------------------------------------------


@pytest.mark.parametrize("shape", [*SMALL_AND_LARGE, (1031, 1019)], ids=str)
def test_threads_make_no_difference(threads, shape):
    w = weight(shape)
    found = []
    for num_threads in (1, 2, 3):
        threads(num_threads)
        found.append(
            (draws.dropped(w, 6, 0.3), draws.noised(w, 6, 0.3), draws.noised(w.double(), 6, 0.3))
        )
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("shape", SMALL_AND_LARGE, ids=str)
def test_dtype_does_not_change_which_entries_are_dropped(shape):
    kept = mask(shape, 6, 0.3) != 0
    for dtype in DTYPES:
        assert torch.equal(mask(shape, 6, 0.3, dtype) != 0, kept)
        # So a copy in lower precision of a dropped weight is the dropped copy, but for rounding.
        assert torch.equal(draws.dropped(torch.ones(shape, dtype=dtype), 6, 0.3) != 0, kept)


@pytest.mark.parametrize("shape", SMALL_AND_LARGE, ids=str)
def test_defaults_of_torch_make_no_difference(shape):
    w = weight(shape)
    expected = draws.dropped(w, 6, 0.3), draws.noised(w, 6, 0.3), mask(shape, 6, 0.3)

    def again():
        return draws.dropped(w, 6, 0.3), draws.noised(w, 6, 0.3), mask(shape, 6, 0.3)

    torch.set_default_dtype(torch.float64)
    try:
        found = again()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        found += again()
    with torch.inference_mode():
        found += again()
    with torch.autocast("cpu", torch.bfloat16):
        found += again()
    for number, value in enumerate(found):
        assert torch.equal(value, expected[number % 3])


@pytest.mark.parametrize("numel", [4096, 2**19])
def test_the_same_seed_repeats_and_another_does_not(numel):
    masks = [mask((numel,), seed, 0.5) for seed in (*SEEDS, *SEEDS)]
    noise = [normals(numel, seed) for seed in (*SEEDS, *SEEDS)]
    for i in range(8):
        for j in range(i):
            is_same = i - j == 4
            assert torch.equal(masks[i], masks[j]) == is_same
            assert torch.equal(noise[i], noise[j]) == is_same


@pytest.mark.parametrize("numel", [4096, 2**19])
def test_no_random_state_moves(numel):
    state, python = torch.get_rng_state(), random.getstate()
    w = weight((numel,))
    moved = torch.get_rng_state()
    draws.dropped(w, 1, 0.5)
    noised_(w, 1, 0.5)
    assert not torch.equal(state, moved)  # by `weight`, so a move would be seen
    assert torch.equal(torch.get_rng_state(), moved)
    assert random.getstate() == python


# --- threads -------------------------------------------------------------------------------------


@pytest.fixture
def threads_seen(monkeypatch, threads):
    """Names of the threads that draw masks, of which there are three."""
    threads(3)
    seen = set()
    draw = draws._masks

    def seeing(*args):
        seen.add(threading.current_thread().name)
        yield from draw(*args)

    monkeypatch.setattr(draws, "_masks", seeing)
    return seen


@pytest.mark.parametrize("shape", SMALL_AND_LARGE, ids=str)
def test_threads_of_the_caller_do_not_disturb_each_other(shape):
    w = weight(shape)
    expected = [(draws.dropped(w, seed, 0.3), draws.noised(w, seed, 0.3)) for seed in range(4)]
    wrong = []

    def work(first):
        for number in range(first, first + 8):
            seed = number % 4
            # Grad mode is on in a new thread; a weight that needs no gradient may be drawn for.
            found = draws.dropped(w, seed, 0.3), draws.noised(w, seed, 0.3)
            wrong.extend(
                seed for a, b in zip(found, expected[seed], strict=True) if not torch.equal(a, b)
            )
        done.append(first)

    done = []
    workers = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(done) == [0, 1, 2, 3]
    assert wrong == []


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_draws_the_same():
    # With one thread, as in a worker of a DataLoader: OpenMP does not outlive a fork.
    done = run("""
        import os
        import torch
        from recoup.weights import draws

        weights = [torch.ones(64, 64), torch.ones(1024, 1024)]
        before = [(draws.dropped(w, 3, 0.5), draws.noised(w, 3, 0.5)) for w in weights]
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            after = [(draws.dropped(w, 3, 0.5), draws.noised(w, 3, 0.5)) for w in weights]
            same = all(torch.equal(a, b) for x, y in zip(before, after) for a, b in zip(x, y))
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
    """)
    assert done.returncode == 0, done.stderr


# --- what is asked of an autograd function that draws --------------------------------------------


@pytest.mark.parametrize("shape", SMALL_AND_LARGE, ids=str)
def test_meta_tensors_have_a_shape(shape):
    w = torch.empty(shape, device="meta")
    for found in (draws.dropped(w, 1, 0.5), draws.noised(w, 1, 0.5), dropped_(w, 1, 0.5)):
        assert found.is_meta
        assert found.shape == shape


@pytest.mark.parametrize("numel", [2**15, 2**17 + 1, 2**21])
@pytest.mark.parametrize("draw", [dropped_, noised_])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_buffer_is_as_large_as_a_large_weight(threads, numel, draw, dtype):
    threads(1)  # bytes are counted in one
    w = weight((numel,), dtype)
    measured = recoup.measure(lambda: draw(w, 1, 0.5), repeats=0)
    assert 0 < measured.peak_bytes <= 256 * 1024


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_p_is_a_share(p):
    for draw in (draws.dropped, dropped_):
        with pytest.raises(ValueError, match="`p`"):
            draw(torch.ones(3), 1, p)
    with pytest.raises(ValueError, match="`p`"):
        mask((3,), 1, p)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_has_63_bits(seed):
    for draw in (draws.dropped, dropped_, draws.noised, noised_):
        with pytest.raises(ValueError, match="`seed`"):
            draw(torch.ones(3), seed, 0.5)
    with pytest.raises(ValueError, match="`seed`"):
        mask((3,), seed, 0.5)


def test_weights_have_floating_point_numbers():
    for draw in (draws.dropped, dropped_, draws.noised, noised_):
        with pytest.raises(ValueError, match="floating-point"):
            draw(torch.ones(3, dtype=torch.int64), 1, 0.5)


# --- the numbers are random ----------------------------------------------------------------------


@pytest.mark.parametrize("numel", [2**16, 2**20 + 3])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_the_share_of_dropped_entries_is_p(numel, p):
    exact = round(p * 65536) / 65536
    for seed in range(3):
        found = mask((numel,), seed, p)
        is_dropped = found == 0
        assert (is_dropped | (found == found.max())).all()
        assert has_share(is_dropped, exact)
        for lane in range(4):
            part = is_dropped[lane::4]
            assert has_share(part, exact)
        assert found.max().item() == pytest.approx(1 / (1 - exact), rel=1e-7)


def test_every_share_of_65536_is_met_exactly():
    for num_dropped in (1, 2, 255, 256, 32767, 32769, 65534, 65535):
        p = num_dropped / 65536
        numel = 2**20
        found = mask((numel,), 3, p)
        assert has_share(found == 0, p)
        # In expectation, an entry is what it was.
        assert p * 0 + (1 - p) * found.max().item() == pytest.approx(1, rel=1e-6)


def test_scales_of_two_bytes_are_finite_and_near():
    for dtype in (torch.float16, torch.bfloat16):
        assert mask((2**20,), 0, 65535 / 65536, dtype).isfinite().all()
        found = mask((64,), 0, 0.3, dtype).max().item()
        assert found == torch.tensor(65536 / (65536 - 19661)).to(dtype).item()


LAGS = (1, 2, 3, 4, 5, 8, 16, 64, 1024, 4096, 32768, 65536, 131072)


@pytest.mark.parametrize("numel", [2**18, 2**20])
@pytest.mark.parametrize("draw", [lambda n, seed: mask((n,), seed, 0.5), normals])
def test_entries_do_not_depend_on_each_other(numel, draw):
    found = draw(numel, 17)
    for lag in (*LAGS, numel // 2):
        assert are_uncorrelated(found[:-lag], found[lag:]), lag
        if found.min() < 0:  # normals: their sizes too
            assert are_uncorrelated(found[:-lag].square(), found[lag:].square()), lag


@pytest.mark.parametrize("numel", [2**16, 2**18 + 8])
@pytest.mark.parametrize("draw", [lambda n, seed: mask((n,), seed, 0.5), normals])
def test_seeds_do_not_depend_on_each_other(numel, draw):
    seeds = [0, 1, 2, 2**32, 2**32 + 1, 2**63 - 1]
    found = [draw(numel, seed) for seed in seeds]
    for i, a in enumerate(found):
        for b in found[:i]:
            assert are_uncorrelated(a, b)
            assert are_uncorrelated(a[1:], b[:-1])
            assert are_uncorrelated(a, b.flip(0))


def test_one_entry_over_many_seeds_is_random_too():
    for numel, index in ((16, 0), (16, 15)):
        kept = torch.stack([mask((numel,), seed, 0.5)[index] > 0 for seed in range(1000)])
        assert has_share(kept, 0.5)
    numel = 2**18 + 8
    values = torch.stack([mask((numel,), seed, 0.5)[:: numel // 64] for seed in range(30)])
    assert has_share(values > 0, 0.5)
    assert values.mean(0).max() < 1 + 5 / math.sqrt(30)


@pytest.mark.parametrize("numel", [2**18, 2**20])
def test_groups_of_eight_entries_are_uniform(numel):
    kept = (mask((numel,), 23, 0.5) > 0).view(-1, 8)
    for bits in (kept, kept.view(2, -1, 4).transpose(0, 1).reshape(-1, 8)):
        counts = torch.bincount((bits * 2 ** torch.arange(8)).sum(1), minlength=256)
        assert are_even(counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [2**18, 2**20])
def test_noise_is_gaussian(numel, dtype):
    for seed in (0, 1):
        for part in normals(numel, seed, dtype).tensor_split(2):
            assert are_gaussian(part)


def test_what_is_not_random_is_seen():
    x, generator = normals(2**17, 0), torch.Generator().manual_seed(0)
    for wrong in (x + 0.02, 1.02 * x, x.abs(), x.clamp(-3.0, 3.0), x + 0.05 * (x.square() - 1)):
        assert not are_gaussian(wrong)
    other = torch.randn(2**17, generator=generator)
    assert not are_uncorrelated(x, other + 0.02 * x)
    assert not has_share(mask((2**17,), 0, 0.31) == 0, 0.3)
    bits = torch.randint(256, (2**17,), generator=generator)
    assert are_even(torch.bincount(bits, minlength=256))
    assert not are_even(torch.bincount(bits // 2 + 64 * (bits > 250), minlength=128))
    assert not are_even(torch.arange(2**17).bincount(minlength=2**17)[:256] * 512)


def test_tails_are_long():
    largest = max(normals(2**20, seed).abs().max().item() for seed in range(4))
    assert 4.7 < largest < 6.7


@pytest.mark.parametrize("numel", [4096, 2**19])
def test_std_scales_the_noise(numel):
    w = weight((numel,))
    for std in (1e-30, 0.01, 3.0):
        noise = noised_(torch.zeros(numel), 5, std) / std
        torch.testing.assert_close(noise, normals(numel, 5), rtol=1e-5, atol=1e-6)
        assert torch.equal(draws.noised(w, 5, std), w + noised_(torch.zeros(numel), 5, std))
