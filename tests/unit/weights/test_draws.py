"""From a seed to a dropped or noisy weight: what a mask and noise are, and what they depend on."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import textwrap
import threading
from importlib.util import find_spec

import pytest
import torch

import recoup
from recoup.residuals.sources import looked_at
from recoup.weights import draws

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Below and above the number of entries from which words are hashed; ends that fill no word.
SHAPES = ((), (0,), (1,), (3, 5), (64, 64), (190, 211), (601, 703))
SEEDS = (0, 1, 2**40 + 3, 2**63 - 1)
MASK_64 = 2**64 - 1


def mask(shape, seed, p, dtype=torch.float32):
    return draws.scales(shape, seed, p, dtype=dtype, device=CPU)


def normals(numel, seed, dtype=torch.float32):
    return draws.noised_(torch.zeros(numel, dtype=dtype), seed, 1.0)


def weight(shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.fixture
def hashed(monkeypatch):
    """Have words hashed for few entries too, as a GPU does."""
    monkeypatch.setattr(draws, "_FEW", -1)


@pytest.fixture
def threads():
    """Set the number of threads, for this test alone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# --- what an entry is, told a second time with numbers of Python ---------------------------------


def signed(word):
    return word - 2**64 if word >> 63 else word


def key_of(seed):
    x = (seed + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return (x ^ (x >> 31)) >> 2


def first_word(number):
    x = signed((number * 0x9E3779B97F4A7C15) & MASK_64)
    x = signed(((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64)
    x = signed(((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64)
    return (x + (x >> 32)) & MASK_64


def second_word(first):
    x = signed(first)
    x = signed(((x ^ (x >> 29)) * 0x6A09E667F3BCC909) & MASK_64)
    return (x + (x >> 32)) & MASK_64


def is_kept(index, numel, seed, p):
    half = 4 * math.ceil(numel / 8)
    place = index % half
    word = first_word(key_of(seed) + place // 4)
    if index >= half:
        word = second_word(word)
    bits = (word >> (16 * (place % 4))) & 0xFFFF
    return (bits ^ 0x8000) >= round(p * 65536)


def normal(index, numel, seed, width):
    """The normal of an entry, of which each has `width` bits."""
    half = math.ceil(numel / 2)
    pair = index % half
    each = 64 // width
    odd = sum(1 << (width * lane) for lane in range(each))
    first = first_word(key_of(seed) + pair // each) | odd
    numbers = []
    for word in (first, second_word(first)):
        bits = (word >> (width * (pair % each))) & (2**width - 1)
        numbers.append((bits - 2**width if bits >> (width - 1) else bits) / 2 ** (width - 1))
    radius, angle = math.sqrt(-2 * math.log(abs(numbers[0]))), math.pi * numbers[1]
    return radius * (math.cos(angle) if index < half else math.sin(angle))


def some_of(numel):
    places = {0, 1, 2, 3, 4, numel // 2 - 1, numel // 2, numel // 2 + 1, numel - 2, numel - 1}
    generator = random.Random(numel)
    return sorted(places | {generator.randrange(numel) for _ in range(200)})


@pytest.mark.parametrize("numel", [2**18 + 1, 2**20 + 5])
@pytest.mark.parametrize("seed", SEEDS)
def test_entries_of_masks_are_what_the_note_says(numel, seed):
    found = mask((numel,), seed, 0.3)
    for index in some_of(numel):
        assert (found[index] != 0) == is_kept(index, numel, seed, 0.3), index


@pytest.mark.parametrize("numel", [1, 2, 3, 4, 5, 7, 8, 9, 17])
def test_few_hashed_entries_are_what_the_note_says(hashed, numel):
    found = mask((numel,), 5, 0.5)
    assert (found != 0).tolist() == [is_kept(i, numel, 5, 0.5) for i in range(numel)]
    expected = torch.tensor([normal(i, numel, 5, 64) for i in range(numel)], dtype=torch.float64)
    torch.testing.assert_close(normals(numel, 5, torch.float64), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 32), (torch.float64, 64)])
@pytest.mark.parametrize("seed", SEEDS)
def test_normals_are_what_the_note_says(dtype, width, seed):
    numel = 2**19 + 3
    found = normals(numel, seed, dtype)
    places = some_of(numel)
    expected = torch.tensor([normal(i, numel, seed, width) for i in places], dtype=dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    torch.testing.assert_close(found[places], expected, rtol=tolerance, atol=tolerance)


# --- the laws between the functions --------------------------------------------------------------


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
    assert draws.dropped_(w, 11, p) is w
    assert torch.equal(w, found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_noised_is_weight_plus_noise(shape, dtype):
    w = weight(shape, dtype)
    raw = w.clone()
    found = draws.noised(w, 11, 0.1)
    assert torch.equal(found, w + draws.noised_(torch.zeros_like(w), 11, 0.1))
    assert found.shape == w.shape
    assert found.dtype is dtype
    assert found.is_contiguous()
    assert torch.equal(w, raw)
    assert draws.noised_(w, 11, 0.1) is w
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
    assert torch.equal(draws.dropped_(w.clone(), 4, 0.4, axes), found)
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
@pytest.mark.parametrize("draw", [draws.dropped_, draws.noised_])
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


@pytest.mark.parametrize("shape", [(64, 64), (600, 700), (1031, 1019)], ids=str)
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


@pytest.mark.parametrize("shape", [(64, 64), (600, 700)], ids=str)
def test_dtype_does_not_change_which_entries_are_dropped(shape):
    kept = mask(shape, 6, 0.3) != 0
    for dtype in DTYPES:
        assert torch.equal(mask(shape, 6, 0.3, dtype) != 0, kept)
        # So a copy in lower precision of a dropped weight is the dropped copy, but for rounding.
        assert torch.equal(draws.dropped(torch.ones(shape, dtype=dtype), 6, 0.3) != 0, kept)


@pytest.mark.parametrize("shape", [(64, 64), (600, 700)], ids=str)
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
    draws.noised_(w, 1, 0.5)
    assert not torch.equal(state, moved)  # by `weight`, so a move would be seen
    assert torch.equal(torch.get_rng_state(), moved)
    assert random.getstate() == python


@pytest.mark.parametrize("numel", [4096, 2**19])
def test_a_region_takes_the_draws_for_repeatable(numel):
    w = weight((numel,))
    with looked_at(None, (), True, "the draws"):
        draws.dropped(w, 1, 0.5)
        draws.noised(w, 1, 0.5)


def test_no_thread_is_left():
    before = threading.enumerate()
    draws.dropped(weight((1024, 1024)), 1, 0.5)
    assert threading.enumerate() == before


@pytest.mark.parametrize("shape", [(64, 64), (600, 700)], ids=str)
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


@pytest.mark.parametrize("shape", [(64, 64), (600, 700)], ids=str)
def test_a_parameter_is_drawn_for_without_gradients(shape):
    parameter = torch.nn.Parameter(weight(shape))
    raw = parameter.detach().clone()
    with torch.no_grad():
        assert torch.equal(draws.dropped(parameter, 2, 0.5), draws.dropped(raw, 2, 0.5))
        assert not draws.noised(parameter, 2, 0.5).requires_grad
        version = parameter._version
        draws.dropped_(parameter, 2, 0.5)
        assert parameter._version > version
    assert torch.equal(parameter.detach(), draws.dropped(raw, 2, 0.5))
    assert parameter.requires_grad
    with pytest.raises(RuntimeError, match="grad"):
        draws.dropped(parameter, 2, 0.5)


@pytest.mark.parametrize("shape", [(64, 64), (600, 700)], ids=str)
def test_meta_tensors_have_a_shape(shape):
    w = torch.empty(shape, device="meta")
    for found in (draws.dropped(w, 1, 0.5), draws.noised(w, 1, 0.5), draws.dropped_(w, 1, 0.5)):
        assert found.is_meta
        assert found.shape == shape


@pytest.mark.parametrize("numel", [2**18 + 1, 2**21])
@pytest.mark.parametrize("draw", [draws.dropped_, draws.noised_])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buffers_take_a_byte_an_entry_at_most(numel, draw, dtype):
    w = weight((numel,), dtype)
    measured = recoup.measure(lambda: draw(w, 1, 0.5), repeats=0)
    assert 0 < measured.peak_bytes <= 1.01 * numel


def test_kernels_are_not_imported_for_the_cpu():
    done = run("""
        import sys
        import torch
        from recoup.weights import draws

        draws.dropped(torch.ones(1024, 1024), 1, 0.5)
        assert "recoup.weights.kernels" not in sys.modules
    """)
    assert done.returncode == 0, done.stderr


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_p_is_a_share(p):
    for draw in (draws.dropped, draws.dropped_):
        with pytest.raises(ValueError, match="`p`"):
            draw(torch.ones(3), 1, p)
    with pytest.raises(ValueError, match="`p`"):
        mask((3,), 1, p)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_has_63_bits(seed):
    for draw in (draws.dropped, draws.dropped_, draws.noised, draws.noised_):
        with pytest.raises(ValueError, match="`seed`"):
            draw(torch.ones(3), seed, 0.5)
    with pytest.raises(ValueError, match="`seed`"):
        mask((3,), seed, 0.5)


def test_weights_have_floating_point_numbers():
    for draw in (draws.dropped, draws.dropped_, draws.noised, draws.noised_):
        with pytest.raises(ValueError, match="floating-point"):
            draw(torch.ones(3, dtype=torch.int64), 1, 0.5)


# --- the numbers are random ----------------------------------------------------------------------

# Seeds are fixed, so what passes once passes always: bounds are such that a right draw fails one
# of these tests in fewer than one choice of seeds in a hundred.


def deviation(successes, trials, p):
    return (successes - trials * p) / math.sqrt(trials * p * (1 - p))


@pytest.mark.parametrize("numel", [2**16, 2**20 + 3])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_the_share_of_dropped_entries_is_p(numel, p):
    exact = round(p * 65536) / 65536
    for seed in range(3):
        found = mask((numel,), seed, p)
        is_dropped = found == 0
        assert (is_dropped | (found == found.max())).all()
        assert abs(deviation(is_dropped.sum().item(), numel, exact)) < 4.5
        for lane in range(4):
            part = is_dropped[lane::4]
            assert abs(deviation(part.sum().item(), part.numel(), exact)) < 4.5
        assert found.max().item() == pytest.approx(1 / (1 - exact), rel=1e-7)


def test_every_share_of_65536_is_met_exactly():
    for num_dropped in (1, 2, 255, 256, 32767, 32769, 65534, 65535):
        p = num_dropped / 65536
        numel = 2**20
        found = mask((numel,), 3, p)
        assert abs(deviation((found == 0).sum().item(), numel, p)) < 4.5
        # In expectation, an entry is what it was.
        assert p * 0 + (1 - p) * found.max().item() == pytest.approx(1, rel=1e-6)


def test_scales_of_two_bytes_are_finite_and_near():
    for dtype in (torch.float16, torch.bfloat16):
        assert mask((2**20,), 0, 65535 / 65536, dtype).isfinite().all()
        found = mask((64,), 0, 0.3, dtype).max().item()
        assert found == torch.tensor(65536 / (65536 - 19661)).to(dtype).item()


def correlation(a, b):
    """In standard deviations of what independent numbers give."""
    a, b = a.double(), b.double()
    a, b = a - a.mean(), b - b.mean()
    return (a @ b / (a.norm() * b.norm()) * math.sqrt(a.numel())).item()


LAGS = (1, 2, 3, 4, 5, 8, 16, 64, 1024, 4096, 32768, 65536, 131072)


@pytest.mark.parametrize("numel", [2**18, 2**20])
@pytest.mark.parametrize("draw", [lambda n, seed: mask((n,), seed, 0.5), normals])
def test_entries_do_not_depend_on_each_other(numel, draw):
    found = draw(numel, 17)
    for lag in (*LAGS, numel // 2):
        assert abs(correlation(found[:-lag], found[lag:])) < 4.5, lag
        if found.min() < 0:  # normals: their sizes too
            assert abs(correlation(found[:-lag].square(), found[lag:].square())) < 4.5, lag


@pytest.mark.parametrize("numel", [2**16, 2**18 + 8])
@pytest.mark.parametrize("draw", [lambda n, seed: mask((n,), seed, 0.5), normals])
def test_seeds_do_not_depend_on_each_other(numel, draw):
    seeds = [0, 1, 2, 2**32, 2**32 + 1, 2**63 - 1]
    found = [draw(numel, seed) for seed in seeds]
    for i, a in enumerate(found):
        for b in found[:i]:
            assert abs(correlation(a, b)) < 4.5
            assert abs(correlation(a[1:], b[:-1])) < 4.5
            assert abs(correlation(a, b.flip(0))) < 4.5


def test_one_entry_over_many_seeds_is_random_too():
    for numel, index in ((16, 0), (16, 15)):
        kept = sum(mask((numel,), seed, 0.5)[index].item() > 0 for seed in range(1000))
        assert abs(deviation(kept, 1000, 0.5)) < 4.5
    numel = 2**18 + 8
    values = torch.stack([mask((numel,), seed, 0.5)[:: numel // 64] for seed in range(30)])
    assert abs(deviation((values > 0).sum().item(), values.numel(), 0.5)) < 4.5
    assert values.mean(0).max() < 1 + 5 / math.sqrt(30)


@pytest.mark.parametrize("numel", [2**18, 2**20])
def test_groups_of_eight_entries_are_uniform(numel):
    kept = (mask((numel,), 23, 0.5) > 0).view(-1, 8)
    for bits in (kept, kept.view(2, -1, 4).transpose(0, 1).reshape(-1, 8)):
        counts = torch.bincount((bits * 2 ** torch.arange(8)).sum(1), minlength=256).double()
        expected = numel / 8 / 256
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - 255) < 4.5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [2**18, 2**20])
def test_noise_is_gaussian(numel, dtype):
    for seed in (0, 1):
        x = normals(numel, seed, dtype).double()
        assert abs(x.mean()) < 4 / math.sqrt(numel)
        assert abs(x.square().mean() - 1) < 4 * math.sqrt(2 / numel)
        assert abs(x.pow(3).mean()) < 4 * math.sqrt(15 / numel)
        assert abs(x.pow(4).mean() - 3) < 4 * math.sqrt(96 / numel)
        for part in (x[: numel // 2], x[numel // 2 :]):
            # Kolmogorov and Smirnov, at one in a thousand.
            found = torch.special.ndtr(part.sort().values)
            steps = torch.arange(1, part.numel() + 1, dtype=torch.float64) / part.numel()
            distance = torch.maximum(
                (steps - found).abs(), (steps - 1 / part.numel() - found).abs()
            )
            assert distance.max().item() * math.sqrt(part.numel()) < 1.95
        for bound in (3.0, 4.0, 4.5):
            p = math.erfc(bound / math.sqrt(2))
            assert abs(deviation((x.abs() > bound).sum().item(), numel, p)) < 4.5


def test_tails_reach_beyond_five():
    largest = max(normals(2**20, seed).abs().max().item() for seed in range(4))
    assert 5 < largest < 6.7


@pytest.mark.parametrize("numel", [4096, 2**19])
def test_std_scales_the_noise(numel):
    w = weight((numel,))
    for std in (1e-30, 0.01, 3.0):
        noise = draws.noised_(torch.zeros(numel), 5, std) / std
        torch.testing.assert_close(noise, normals(numel, 5), rtol=1e-5, atol=1e-6)
        assert torch.equal(draws.noised(w, 5, std), w + draws.noised_(torch.zeros(numel), 5, std))


# --- the kernels, interpreted --------------------------------------------------------------------


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(find_spec("numpy") is None, reason="Triton's interpreter needs numpy")
def test_kernels_draw_what_operators_draw():
    done = run(
        """
        import torch
        from recoup.weights import draws, kernels

        draws._FEW = -1
        tolerances = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 2e-3}
        for dtype, tolerance in tolerances.items():
            for numel in (0, 1, 3, 4, 5, 9, 16, 1000, 5003):
                w = torch.randn(numel, dtype=torch.float64).to(dtype)
                for seed, num_dropped in ((0, 19661), (2**63 - 1, 32768), (7, 65535), (7, 1)):
                    numbers = draws._key(seed), num_dropped, draws._scale(num_dropped, dtype)
                    p = num_dropped / 65536
                    expected = draws.dropped(w, seed, p)
                    found = torch.full_like(w, torch.nan)
                    kernels.drop(w, found, *numbers)
                    assert torch.equal(found, expected)
                    in_place = w.clone()
                    kernels.drop(in_place, in_place, *numbers)
                    assert torch.equal(in_place, expected)
                    kernels.write_scales(found, *numbers)
                    assert torch.equal(
                        found, draws.scales((numel,), seed, p, dtype=dtype, device=w.device)
                    )
                found = torch.full_like(w, torch.nan)
                kernels.add_noise(w, found, draws._key(5), 0.3)
                torch.testing.assert_close(
                    found, draws.noised(w, 5, 0.3), rtol=tolerance, atol=tolerance
                )
        """,
        TRITON_INTERPRET="1",
    )
    assert done.returncode == 0, done.stderr
