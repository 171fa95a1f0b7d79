"""Second runs on a GPU, where backward is in a thread of its own, are compared when it ends."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recoup
from recoup._core.sketch import difference, numbers_of, sketch_of, tolerance_of
from recoup.errors import ReplayError

pytestmark = pytest.mark.cuda
DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64,
    torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip


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
