"""Typicality, and the cost of a flow beside that of a coder of pictures."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch
from torch.distributions import Uniform

from recoup.flows import Flow, coded_bits_per_dim, complexity_ratio, outliers, typicality
from recoup.invertible import Chain, Flip


def uniform_flow(levels=256, shape=(1, 8, 8)):
    """A flow in which every picture costs log2(levels) bits a value."""
    return Flow(Chain(Flip()), shape=shape, levels=levels, base=Uniform(0.0, 1.0)).eval()


def test_typicality_is_the_distance_from_the_mean_cost():
    flow = Flow(Chain(Flip()), shape=(3,))
    x, reference = torch.randn(5, 3), torch.tensor([1.0, 2.0, 6.0])
    expected = (flow.bits_per_dim(x) - 3).abs()
    torch.testing.assert_close(typicality(flow, x, reference), expected)
    assert not typicality(flow, x.requires_grad_(), reference).requires_grad


def decoded(residuals, kind):
    """Undo one of PNG's forecasts as its specification says it, byte by byte."""
    image = torch.zeros_like(residuals)
    for channel, row, column in itertools.product(*map(range, residuals.shape)):
        at = image[channel]
        a = int(at[row, column - 1]) if column else 0
        b = int(at[row - 1, column]) if row else 0
        c = int(at[row - 1, column - 1]) if row and column else 0
        p = a + b - c
        paeth = min((a, b, c), key=lambda near: abs(p - near))  # the first of equally near ones
        forecast = (0, a, b, (a + b) // 2, paeth)[kind]
        at[row, column] = (int(residuals[channel, row, column]) + forecast) % 256
    return image


def test_the_coder_loses_nothing():
    x = torch.randint(256, (2, 2, 6, 5))
    x[0] = x[0] // 200  # ties between forecasts
    for kind, residuals in enumerate(outliers._residuals(x)):
        assert torch.equal(torch.stack([decoded(each, kind) for each in residuals]), x)


def test_code_lengths_are_those_of_deflate():
    x = torch.arange(8).repeat(8, 1)[None, None] * 30  # a ramp: each pixel 30 more than its left
    bits = coded_bits_per_dim(x.float())
    assert bits.dtype == torch.float64
    ramp = bytes([0, *[30] * 7] * 8)
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    assert bits.item() <= 8 * len(coder.compress(ramp) + coder.flush()) / 64
    noise = coded_bits_per_dim(torch.randint(256, (3, 1, 8, 8)))
    assert (noise > bits).all()
    # The ratio is what the flow costs more than the coder.
    x = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    scores = complexity_ratio(uniform_flow(shape=(3, 8, 8)), x)
    torch.testing.assert_close(scores, (8 - coded_bits_per_dim(x)).float())
    assert coded_bits_per_dim(torch.zeros(0, 1, 8, 8)).shape == (0,)


NO_PICTURES = Flow(Chain(Flip()), shape=(1, 8, 8)), uniform_flow(300), uniform_flow(shape=(64,))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((lambda given=given: typicality(uniform_flow(), torch.zeros(1, 1, 8, 8), given),
           "`reference_bits` has shape")
          for given in (torch.tensor(1.0), torch.zeros(0), torch.zeros(2, 2))),
        *((lambda flow=flow: complexity_ratio(flow, torch.zeros(1, *flow.shape)),
           "Use `typicality`") for flow in NO_PICTURES),
        (lambda: coded_bits_per_dim(torch.zeros(8, 8)), r"`x` has shape \(8, 8\)"),
        *((lambda value=value: coded_bits_per_dim(torch.full((1, 1, 2, 2), value)),
           "whole numbers, 0 to 255") for value in (-1, 256, 0.5)),
    ],
)  # fmt: skip
def test_unsuitable_arguments_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
