"""Outcomes of steps that differ: which of it is rounding, and what counts as held."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn

import recoup
from recoup.planning.compiling import NudgedCode
from recoup.planning.verification import Verification, outcome_of
from tests.plan_oracle import Made, square, ways_of

ONES, SMALL = torch.ones(64), torch.full((64,), 1e-3)
HALVES, SIGNS = ONES.bfloat16(), torch.arange(64) % 2 - 0.5


def of(large, small=None, buffer=None):
    """The outcome of a step of a model with two parameters, one with a large gradient."""
    model = nn.Module()
    model.large, model.small = (nn.Parameter(torch.zeros(64, dtype=large.dtype)) for _ in range(2))
    model.register_buffer("buffer", torch.zeros(3) if buffer is None else buffer)
    model.large.grad = large
    model.small.grad = torch.zeros(64) if small is None else small
    return outcome_of(model, [])


def again(*outcome):
    return lambda verification: verification.expect_again(of(*outcome))


def grown(before, nudged):
    return lambda verification: verification.allow_growth(of(*before), of(*nudged))


# Positions, frequencies, and a count.
LARGE = [torch.arange(512), torch.arange(512.0), torch.tensor(10**9)]
COUNTS, FEW = torch.tensor([1, 2, 10**6]), torch.tensor([1e-3, 2e-3, 3e-3])
NOISE = again(1.001 * ONES, ONES)
TURNED = grown([ONES], [ONES])
# What is expected, what else is known, what is found, and the name of what differs.
CASES = [
    # A large buffer says nothing of gradients.
    *(case for each in LARGE for case in (
        ((SMALL, None, each), None, (SMALL, None, each), None),
        ((SMALL, None, each), None, (-SMALL, None, each), "`large`"),
        ((SMALL, None, each), again(-SMALL, None, each), (-SMALL, None, each), "`large`"),
    )),
    # Kernels that sum in no fixed order move one gradient in a run, and another in the next.
    ((ONES, ONES), None, (ONES, 1.002 * ONES), "`small`"),
    ((ONES, ONES), NOISE, (ONES, 1.002 * ONES), None),
    ((ONES, ONES), NOISE, (ONES, 1.02 * ONES), "`small`"),
    ((ONES, ONES), again(-ONES, ONES), (ONES, 1.002 * ONES), "`small`"),  # which is no rounding
    ((ONES, ONES), NOISE, (ONES, ONES, torch.tensor([0, 0, 1])), "`buffer`"),
    # Noise of 16 bits may be several hundredths, as of gradients of keys in a Llama of 16 layers.
    *(case for moved, most, different in ((1.0, 1.008, 1.02), (1.02, 1.02, 1.05)) for case in (
        ((HALVES, HALVES), again(moved * HALVES, HALVES), (HALVES, most * HALVES), None),
        ((HALVES, HALVES), again(moved * HALVES, HALVES), (HALVES, different * HALVES), "`small`"),
    )),
    # Buffers are compared with buffers.
    ((ONES, None, FEW), None, (ONES, None, FEW * (1 + 2**-23)), None),
    ((ONES, None, FEW), None, (ONES, None, FEW * (1 + 1e-3)), "`buffer`"),
    ((ONES, None, COUNTS), None, (ONES, None, torch.tensor([1, 3, 10**6])), "`buffer`"),
    # Of no gradient more than an eighth is rounding.
    *(case for moved in (0.001, 0.05, 0.5) for growth, most in (
        (grown([ONES / 8, SMALL], [ONES / 8, (1 + moved) * SMALL]), min(8 * moved, 1 / 8)),
    ) for case in (
        ((ONES / 8, SMALL), growth, (ONES / 8, (1 + 0.3 * most) * SMALL), None),
        ((ONES / 8, SMALL), growth, (ONES / 8, (1 + 2 * most) * SMALL), "`small`"),
    )),
    # A thousandth of a gradient may turn over.
    ((ONES,), None, (ONES + 2e-4 * SIGNS,), "`large`"),
    ((ONES,), TURNED, (ONES + 2e-4 * SIGNS,), None),
    ((ONES,), TURNED, (ONES + 2e-2 * SIGNS,), "`large`"),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "known", "found", "differs"), CASES)
def test_what_differs_is_named_unless_it_is_rounding(expected, known, found, differs):
    verification = Verification()
    verification.expect(of(*expected), is_plain=True)
    if known is not None:
        known(verification)
    message = verification.difference(of(*found))
    assert message is None if differs is None else differs in message


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_a_block_that_draws_from_another_stream_does_not_run_again(draw):
    """Or it would draw twice, whether what it draws matters or not."""
    drawing = lambda block, x: (draw(), x + block.up(x).tanh())[1]  # noqa: E731
    model = nn.Sequential(*(Made(drawing, up=nn.Linear(16, 16)) for _ in range(4)))
    with pytest.warns(UserWarning, match=r"keeps all residuals.*the random stream"):
        plan = recoup.plan(model, torch.randn(64, 16), budget="1 GiB", loss=square)
    assert ways_of(plan) == {"keep"}


def test_what_a_block_passes_on_is_not_nudged():
    mask, x = torch.ones(4, 8), torch.randn(4, 8)
    smallest = torch.full((3,), torch.finfo(torch.float32).min)
    nudged = NudgedCode().of_call(nn.Identity(), lambda x, mask: (2 * x, mask, smallest))
    made, passed_on, extreme = nudged(x, mask)
    assert passed_on is mask
    assert extreme.isfinite().all()
    assert not torch.equal(made, 2 * x)
    torch.testing.assert_close(made, 2 * x, rtol=3e-7, atol=0)
    assert torch.equal(nudged(x, mask)[0], made)
