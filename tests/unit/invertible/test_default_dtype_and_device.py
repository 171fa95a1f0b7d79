"""Layers that are given no type and no device have torch's defaults, in all of their tensors."""

from __future__ import annotations

import pytest
import torch

from recoup.flows import FlowPlusPlus, Glow
from recoup.invertible import InvertibleConv1x1, InvertibleConv1x1LU

BUILT = {
    "InvertibleConv1x1": lambda: InvertibleConv1x1(2),
    "InvertibleConv1x1LU": lambda: InvertibleConv1x1LU(2),
    "Glow": lambda: Glow((2, 4, 4), levels=None, width=4),
    "FlowPlusPlus": lambda: FlowPlusPlus((2, 4, 4), levels=None, width=4),
}


@pytest.fixture
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def tensors_of(module):
    return [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("name", BUILT)
def test_the_type(name):
    module = BUILT[name]()
    assert {each.dtype for each in tensors_of(module)} == {torch.float64}
    x = torch.rand(3, 2, 4, 4)
    found = module.log_prob(x) if hasattr(module, "log_prob") else module(x)[0]
    assert found.dtype is torch.float64


@pytest.mark.parametrize("name", ["InvertibleConv1x1", "InvertibleConv1x1LU"])
def test_the_device(name):
    with torch.device("meta"):
        module = BUILT[name]()
    assert {each.device.type for each in tensors_of(module)} == {"meta"}


@pytest.mark.parametrize("kind", [InvertibleConv1x1, InvertibleConv1x1LU])
def test_a_type_that_is_given(kind):
    assert {each.dtype for each in tensors_of(kind(2, dtype=torch.float64))} == {torch.float64}
    assert {each.dtype for each in tensors_of(kind(2))} == {torch.float32}
