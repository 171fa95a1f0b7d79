"""Draws on a GPU: the laws, and the bytes of temporaries."""

from __future__ import annotations

import pytest
import torch

from recoup.weights import draws
from tests.chance import are_gaussian, has_share

pytestmark = pytest.mark.cuda

CUDA = torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((), (0,), (3,), (64, 64), (4097,), (2**20 + 5,))
SEEDS = (0, 7, 2**32 + 1, 2**63 - 1)


def weight(shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64, device=CUDA).to(dtype)


def mask(shape, seed, p, dtype=torch.float32):
    return draws.scales(shape, seed, p, dtype=dtype, device=CUDA)


DRAWS = {
    "mask": (lambda w, seed, p, **how: draws.dropped(w, seed, p, **how), 1.0, torch.mul),
    "noise": (lambda w, seed, p, **how: draws.noised(w, seed, p, **how), 0.0, torch.add),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_scales_or_is_added_to_any_weight_alike(name, shape, dtype, p):
    """Wherever it is in memory; and no random state moves."""
    draw, start, combine = DRAWS[name]
    w = weight(shape, dtype)
    raw, moved = w.clone(), torch.cat([w.new_zeros(3), w.flatten()])[3:].view(shape)
    cpu, gpu = torch.get_rng_state(), torch.cuda.get_rng_state()
    for seed in SEEDS:
        found = draw(w, seed, p)
        assert torch.equal(found, combine(w, draw(torch.full_like(w, start), seed, p)))
        assert all(torch.equal(found, draw(again, seed, p)) for again in (w, moved))
        assert (found.shape, found.dtype, found.device) == (w.shape, dtype, w.device)
    assert torch.equal(w, raw)
    assert draw(w, seed, p, in_place=True) is w
    assert torch.equal(w, found)
    assert torch.equal(torch.get_rng_state(), cpu)
    assert torch.equal(torch.cuda.get_rng_state(), gpu)


def test_dtype_does_not_change_which_entries_are_dropped():
    kept = mask((5000,), 6, 0.3) != 0
    for dtype in DTYPES:
        found = mask((5000,), 6, 0.3, dtype)
        assert torch.equal(found != 0, kept)
        expected = torch.tensor(65536 / (65536 - 19661), dtype=dtype)
        assert found.max().item() == expected.item()


@pytest.mark.parametrize("axes", [(), (0,), (1,), (0, 2)])
def test_axes_and_layouts(axes):
    w = weight((70, 30, 90))
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(w.shape))
    expected = w * mask(shape, 3, 0.4)
    assert torch.equal(draws.dropped(w, 3, 0.4, axes), expected)
    transposed = w.transpose(0, 2).contiguous().transpose(0, 2)
    found = draws.dropped(transposed, 3, 0.4, axes)
    assert found.is_contiguous()
    assert torch.equal(found, expected)
    assert torch.equal(draws.dropped(transposed, 3, 0.4, axes, in_place=True), expected)


def peak_beyond(call):
    call()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def test_no_mask_of_the_whole_weight_is_made():
    w = weight((2**25,))
    # Beside the result, pieces of 4 Mi entries: words, a mask, and what operators convert.
    assert peak_beyond(lambda: draws.dropped(w, 2, 0.3)) <= w.nbytes + 2**22 * 12
    assert peak_beyond(lambda: draws.noised(w, 2, 0.3, in_place=True)) <= 2**22 * 12


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9])
def test_the_share_of_dropped_entries_is_p(p):
    assert has_share(mask((2**22,), 3, p) == 0, round(p * 65536) / 65536)


def test_noise_is_gaussian():
    assert are_gaussian(draws.noised(torch.zeros(2**22, device=CUDA), 2, 1.0).cpu())
