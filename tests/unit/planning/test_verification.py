from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn

import recoup
from recoup.planning.compiling import BlockCode, NudgedCode
from recoup.planning.measuring import measure_blocks
from recoup.planning.step import Step
from recoup.planning.verification import Verification, outcome_of


class Buffered(nn.Module):
    """Two parameters, one with a large gradient, and a buffer."""

    def __init__(self, buffer, dtype):
        super().__init__()
        self.large, self.small = (nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in range(2))
        self.register_buffer("buffer", buffer)


def outcome(large, small=None, buffer=None):
    model = Buffered(torch.zeros(3) if buffer is None else buffer, large.dtype)
    model.large.grad = large
    model.small.grad = torch.zeros(64) if small is None else small
    return outcome_of(model, [])


def verification(expected):
    found = Verification()
    found.expect(expected, is_plain=True)
    return found


@pytest.mark.parametrize(
    "buffer",
    [torch.arange(512), torch.arange(512.0), torch.tensor(10**9)],
    ids=["positions", "frequencies", "a count"],
)
def test_a_large_buffer_says_nothing_of_gradients(buffer):
    gradient = torch.full((64,), 1e-3)
    found = verification(outcome(gradient, buffer=buffer))
    assert found.difference(outcome(gradient, buffer=buffer)) is None
    assert "`large`" in found.difference(outcome(-gradient, buffer=buffer))
    found.expect_again(outcome(-gradient, buffer=buffer))
    assert "`large`" in found.difference(outcome(-gradient, buffer=buffer))


def test_noise_of_one_gradient_is_allowed_of_all():
    """Kernels that sum in no fixed order move one of them in a run, and another in the next."""
    large, small = torch.ones(64), torch.ones(64)
    found = verification(outcome(large, small))
    assert "`small`" in found.difference(outcome(large, 1.002 * small))
    found.expect_again(outcome(1.001 * large, small))
    assert found.difference(outcome(large, 1.002 * small)) is None
    assert "`small`" in found.difference(outcome(large, 1.02 * small))
    found = verification(outcome(large, small))
    found.expect_again(outcome(-large, small))  # which is no rounding
    assert "`small`" in found.difference(outcome(large, 1.002 * small))
    assert "`buffer`" in found.difference(outcome(large, small, torch.tensor([0, 0, 1])))


def test_noise_of_16_bits_may_be_several_hundredths():
    """On an H200, gradients of keys in a Llama of 16 layers moved by 0.02 of their length."""
    values = torch.ones(64, dtype=torch.bfloat16)
    for again, allowed, different in ((1.0, 1.008, 1.02), (1.02, 1.02, 1.05)):
        found = verification(outcome(values, values))
        found.expect_again(outcome(again * values, values))
        assert found.difference(outcome(values, allowed * values)) is None
        assert "`small`" in found.difference(outcome(values, different * values))


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_a_block_that_draws_from_another_stream_does_not_run_again(draw):
    """Or it would draw twice, whether what it draws matters or not."""

    class Drawing(nn.Sequential):
        def forward(self, x):
            self.drawn = draw()
            return x + super().forward(x)

    parts = (Drawing(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4))
    model, x = nn.Sequential(*parts), torch.randn(64, 16)
    with pytest.warns(UserWarning, match=r"keeps all residuals.*the random stream"):
        plan = recoup.plan(model, x, budget="1 GiB", policy=None, loss=lambda y: y.square().mean())
    assert all(row.way == "keep" for row in plan.blocks)


def test_buffers_are_compared_with_buffers():
    gradient, buffer = torch.ones(64), torch.tensor([1e-3, 2e-3, 3e-3])
    found = verification(outcome(gradient, buffer=buffer))
    assert found.difference(outcome(gradient, buffer=buffer * (1 + 2**-23))) is None
    assert "`buffer`" in found.difference(outcome(gradient, buffer=buffer * (1 + 1e-3)))
    counts = verification(outcome(gradient, buffer=torch.tensor([1, 2, 10**6])))
    assert "`buffer`" in counts.difference(outcome(gradient, buffer=torch.tensor([1, 3, 10**6])))


@pytest.mark.parametrize("moved", [0.001, 0.05, 0.5])
def test_of_no_gradient_more_than_an_eighth_is_rounding(moved):
    large, small = torch.full((64,), 0.125), torch.full((64,), 1e-3)
    found = verification(outcome(large, small))
    found.allow_growth(outcome(large, small), outcome(large, (1 + moved) * small))
    most = min(8 * moved, 1 / 8)
    assert found.difference(outcome(large, (1 + 0.3 * most) * small)) is None
    assert "`small`" in found.difference(outcome(large, (1 + 2 * most) * small))


def test_a_thousandth_of_a_gradient_may_turn_over():
    gradient, signs = torch.ones(64), torch.arange(64) % 2 - 0.5
    found = verification(outcome(gradient))
    assert found.difference(outcome(gradient + 2e-4 * signs)) is not None
    found.allow_growth(outcome(gradient), outcome(gradient))
    assert found.difference(outcome(gradient + 2e-4 * signs)) is None
    assert found.difference(outcome(gradient + 2e-2 * signs)) is not None


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


class Masked(nn.Module):
    """A block that saves `x`, and neither its mask nor its output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x, mask):
        return self.linear(x) + mask


class Unlinked(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(3))
        self.mask = nn.Linear(64, 64)

    def forward(self, x):
        mask = self.mask(x)
        for block in self.blocks:
            x = block(x.sin(), mask)
        return x


class Other(BlockCode):
    """Code that counts as another one than the block's own."""


def test_arguments_that_others_were_given_count_as_held():
    model = Unlinked()
    step = Step(model, model, (torch.randn(256, 64),), {}, lambda output: [output.square().sum()])
    blocks = [(f"blocks.{place}", block) for place, block in enumerate(model.blocks)]
    for code in (Other(), BlockCode(), None):
        calls = measure_blocks(step, blocks, code).calls
        assert [call.unheld_bytes for call in calls] == [0, 0, 0]
        assert calls[1].state_bytes == 256 * 64 * 4  # without the mask
