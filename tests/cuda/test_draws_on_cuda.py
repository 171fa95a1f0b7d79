"""Draws on a GPU: the same masks as on the CPU, by one kernel or by operators, in one pass."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest
import torch

from recoup.weights import draws

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NUMELS = (0, 1, 3, 4, 5, 16, 1000, 4099, 2**20, 2**20 + 5)
WAYS = ("kernel", "operators")


@pytest.fixture(autouse=True)
def hashed(monkeypatch):
    """Have the CPU hash words for few entries too, as a GPU does."""
    monkeypatch.setattr(draws, "_FEW", -1)


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Draw by the kernels, and by torch's operators."""
    if request.param == "operators":
        monkeypatch.setattr(draws, "_kernels", lambda device: None)
    elif find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return request.param


def test_kernels_are_used_where_triton_is_installed():
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    device = torch.empty(0, device=CUDA).device
    assert draws._kernels(device) is not None
    assert draws._kernels(device) is draws._kernels(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 65535 / 65536, 1.0])
def test_masks_are_those_of_the_cpu(way, numel, dtype, p):
    w = torch.randn(numel, dtype=torch.float64).to(dtype)
    on_gpu = w.cuda()
    for seed in (0, 7, 2**63 - 1):
        expected = draws.dropped(w, seed, p)
        assert torch.equal(draws.dropped(on_gpu, seed, p).cpu(), expected)
        assert torch.equal(
            draws.scales((numel,), seed, p, dtype=dtype, device=CUDA).cpu(),
            draws.scales((numel,), seed, p, dtype=dtype, device=CPU),
        )
    assert torch.equal(on_gpu.cpu(), w)
    assert draws.dropped_(on_gpu, seed, p) is on_gpu
    assert torch.equal(on_gpu.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
def test_noise_is_that_of_the_cpu(way, numel, dtype):
    w = torch.randn(numel, dtype=torch.float64).to(dtype)
    on_gpu = w.cuda()
    tolerance = {8: 1e-12, 4: 1e-5, 2: 2e-2}[dtype.itemsize]
    for seed in (0, 7, 2**63 - 1):
        found = draws.noised(on_gpu, seed, 0.3)
        expected = draws.noised(w, seed, 0.3)
        torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)
        noise = draws.noised_(torch.zeros_like(on_gpu), seed, 0.3)
        assert torch.equal(found, on_gpu + noise)
        assert torch.equal(found, draws.noised(on_gpu, seed, 0.3))
    assert draws.noised_(on_gpu, seed, 0.3) is on_gpu
    assert torch.equal(on_gpu, found)


@pytest.mark.parametrize("axes", [(), (0,), (1,), (0, 2)])
def test_axes_and_layouts(way, axes):
    w = torch.randn(70, 30, 90)
    expected = draws.dropped(w, 3, 0.4, axes)
    assert torch.equal(draws.dropped(w.cuda(), 3, 0.4, axes).cpu(), expected)
    transposed = w.cuda().transpose(0, 2).contiguous().transpose(0, 2)
    found = draws.dropped(transposed, 3, 0.4, axes)
    assert found.is_contiguous()
    assert torch.equal(found.cpu(), expected)
    assert draws.dropped_(transposed, 3, 0.4, axes) is transposed
    assert torch.equal(transposed.cpu(), expected)


def test_a_weight_that_is_not_aligned(way):
    w = torch.randn(2**16 + 3)
    expected = draws.dropped(w[3:], 3, 0.4)
    assert torch.equal(draws.dropped(w.cuda()[3:], 3, 0.4).cpu(), expected)


def test_noise_is_gaussian(way):
    numel = 2**22
    x = draws.noised_(torch.zeros(numel, device=CUDA), 1, 1.0).double()
    assert abs(x.mean()) < 4 / math.sqrt(numel)
    assert abs(x.square().mean() - 1) < 4 * math.sqrt(2 / numel)
    assert abs(x.pow(4).mean() - 3) < 4 * math.sqrt(96 / numel)
    found = torch.special.ndtr(x.sort().values)
    steps = torch.arange(1, numel + 1, dtype=torch.float64, device=CUDA) / numel
    assert (steps - found).abs().max().item() * math.sqrt(numel) < 1.95


def test_no_random_state_moves(way):
    w = torch.randn(2**16, device=CUDA)
    cpu, gpu = torch.get_rng_state(), torch.cuda.get_rng_state()
    draws.dropped(w, 1, 0.5)
    draws.noised(w, 1, 0.5)
    assert torch.equal(torch.get_rng_state(), cpu)
    assert torch.equal(torch.cuda.get_rng_state(), gpu)


def test_kernels_make_nothing_but_the_result():
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    w = torch.randn(2**24, device=CUDA)
    for draw in (draws.dropped_, draws.noised_):
        draw(w, 1, 0.5)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        draw(w, 2, 0.5)
        assert torch.cuda.max_memory_allocated() == before


def test_operators_take_a_byte_an_entry_at_most(monkeypatch):
    monkeypatch.setattr(draws, "_kernels", lambda device: None)
    w = torch.randn(2**22, device=CUDA)
    for draw in (draws.dropped_, draws.noised_):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        draw(w, 2, 0.5)
        # Besides, operators that convert or compare have buffers of their own.
        assert torch.cuda.max_memory_allocated() - before <= 1.5 * w.numel()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_draws_run_where_the_weight_is(way):
    w = torch.randn(5000)
    assert torch.equal(draws.dropped(w.to("cuda:1"), 1, 0.5).cpu(), draws.dropped(w, 1, 0.5))
