"""Regions on a GPU: the numbers and the stream of the plain run, flat memory, and what is refused.

Backward is in a thread of its own there, so second runs are compared when it ends.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recoup
from recoup._core.sketch import difference, numbers_of, sketch_of, tolerance_of
from recoup.errors import ReplayError
from recoup.invertible import AdditiveCoupling, Chain
from tests.oracle import assert_same_step, run_step

pytestmark = pytest.mark.cuda
WIDE = 1024
DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64,
    torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip


def network():
    convolutions = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)]
    return nn.Sequential(
        convolutions[0], nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), convolutions[1]
    )


def chain(memory, num_blocks=6):
    blocks = [AdditiveCoupling(network(), network()) for _ in range(num_blocks)]
    return Chain(*blocks, memory=memory).to("cuda", torch.float64)


@pytest.mark.parametrize("memory", ["sqrt", "log", "constant", 3])
def test_gradients_and_stream_equal_linear_with_dropout_and_batch_norm(memory):
    model = chain("linear")
    x = torch.randn(4, 16, 8, 8, device="cuda", dtype=torch.float64).requires_grad_()
    (found, stream), (wanted, plain_stream) = (
        (run_step(model, x, memory=mode), torch.rand(1, device="cuda"))
        for mode in (memory, "linear")
    )
    assert_same_step(found, wanted, 1e-9)
    assert torch.equal(stream, plain_stream)


def test_constant_memory_is_flat():
    peaks = {}
    for depth in (8, 64):
        model = chain("constant", depth)
        x = torch.randn(64, 16, 32, 32, device="cuda", dtype=torch.float64)

        def step(model=model, x=x):
            y, _ = model(x)
            y.square().mean().backward()

        step()
        peaks[depth] = recoup.measure(step, device="cuda", repeats=0).peak_bytes
    assert peaks[64] <= 1.02 * peaks[8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 65, 34_817, 2**23 + 5])
def test_one_entry_is_seen(size, dtype):
    torch.manual_seed(0)
    first = (100 * torch.randn(size, dtype=torch.float64, device="cuda")).to(dtype)
    assert numbers_of(sketch_of(first)) == numbers_of(sketch_of(first.clone()))
    for place in {0, size // 2, size - 1}:
        second = first.clone()
        second[place] = not first[place] if dtype is torch.bool else first[place] + 2 * size**0.5
        found = difference(sketch_of(first), sketch_of(second)) / tolerance_of(dtype)
        by = 2 * size**0.5 / float(first.double().norm()) if first.is_floating_point() else 1.0
        assert found > 1 or by < 10 * tolerance_of(dtype)


def masked(y, n):
    return torch.where(torch.arange(64, device="cuda") % 7 == n, y, -y).sin()


def drawn(y, n):
    generator = torch.Generator("cuda").manual_seed(n)
    return (y * torch.rand(64, device="cuda", generator=generator)).tanh()


IMPURE = {
    "a number": lambda y, n: (y * n).tanh(),
    "a mask": masked,
    "an index": lambda y, n: y[:, (torch.arange(8, device="cuda") + n) % 64].sin(),
    "a draw of another generator": drawn,
}


@pytest.mark.parametrize("way", IMPURE)
def test_what_runs_otherwise_is_an_error(way):
    linear, x = nn.Linear(64, 64).cuda(), torch.randn(32, 64, device="cuda", requires_grad=True)
    runs = itertools.count(1)
    for _ in range(2):
        y = recoup.checkpoint(lambda x: IMPURE[way](linear(x), next(runs)), x)
        with pytest.raises(ReplayError, match="did not repeat its first run"):
            y.square().mean().backward()
    block, found = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.Tanh()).cuda(), []
    for run in (block, lambda x: recoup.checkpoint(block, x)):  # what failed has left nothing
        torch.manual_seed(1)
        found += torch.autograd.grad(run(x).sum(), x)
    assert torch.equal(*found)


def test_kernels_that_sum_in_no_fixed_order_are_no_error():
    index = torch.randint(50, (200_000,), device="cuda")
    x = torch.randn(200_000, 8, device="cuda", requires_grad=True)

    def gathered(x):
        return torch.zeros(50, 8, device="cuda").index_add(0, index, x.sin())[index].exp()

    for _ in range(5):
        recoup.checkpoint(gathered, x).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_every_kind_with_dropout(dtype):
    """Its kernels draw from a seed and an offset that they save."""
    q, k, v = (torch.randn(2, 4, 128, 32, device="cuda", dtype=dtype, requires_grad=True)
               for _ in range(3))  # fmt: skip

    def attended(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)

    found = []
    for run in (attended, lambda *x: recoup.checkpoint(attended, *x)):
        torch.manual_seed(1)
        found.append(torch.autograd.grad(run(q, k, v).float().square().sum(), (q, k, v)))
    for got, want in zip(*found, strict=True):
        assert (got - want).float().norm() < 0.01 * want.float().norm()


def made():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.RReLU()) for _ in range(16)]
    return nn.Sequential(*layers).cuda(), torch.randn(4 * WIDE, WIDE, device="cuda")


def step(model, x, around):
    torch.manual_seed(1)
    with around:
        loss = model(x * 1).square().mean()
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("where", ["host", "folder", "schedule"])
@pytest.mark.parametrize("in_flight_bytes", [None, 1, "1 GiB"])
def test_residuals_that_wait_in_host_memory_or_in_a_folder(where, in_flight_bytes, tmp_path):
    model, x = made()
    wanted, around = step(model, x, nullcontext()), nullcontext()
    if where == "schedule":
        model = recoup.Sequential(*model, memory=recoup.schedules.offloaded(16))
        x.requires_grad_()
    else:
        to = tmp_path if where == "folder" else "host"
        around = recoup.offloading("1 MiB", to, in_flight_bytes=in_flight_bytes)
    for _ in range(5):
        torch.testing.assert_close(step(model, x, around), wanted, rtol=0, atol=0)


def test_what_offloading_holds_on_the_device():
    model, x = made()
    held = []
    for around in (nullcontext(), recoup.offloading("1 MiB")):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with around:
            y = model(x)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        del y
    assert held[0] >= 30 * x.numel() * 4
    assert held[1] <= 6 * x.numel() * 4  # the output, two in flight, and what one operator makes
