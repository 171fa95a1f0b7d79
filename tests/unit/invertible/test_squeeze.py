from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.invertible import Squeeze


def test_is_space_to_depth_and_not_a_reshape():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    y, log_det = Squeeze()(x)
    assert y[0].tolist() == [
        [[0, 2], [8, 10]],
        [[1, 3], [9, 11]],
        [[4, 6], [12, 14]],
        [[5, 7], [13, 15]],
    ]
    assert log_det.tolist() == [0.0]


@given(st.tuples(*[st.integers(1, 3)] * 5))
@settings(deadline=None, max_examples=30)
def test_round_trip_of_any_shape_is_exact(sizes):
    factor, n, c, h, w = sizes
    x = torch.randn(n, c, h * factor, w * factor)
    y, _ = Squeeze(factor)(x)
    assert y.shape == (n, c * factor**2, h, w)
    assert torch.equal(Squeeze(factor).inverse(y)[0], x)


@pytest.mark.parametrize("shape", [(1, 1, 5, 4), (1, 1, 4, 5), (1, 4, 4)])
def test_odd_sizes_are_refused_by_shape_and_factor(shape):
    with pytest.raises(ValueError, match=r"`x` has shape .* `factor` 2"):
        Squeeze()(torch.randn(shape))


def test_inverse_refuses_channels_that_fill_no_patch():
    with pytest.raises(ValueError, match="multiple of 4"):
        Squeeze().inverse(torch.randn(1, 6, 2, 2))


def test_factor_below_one_is_refused():
    with pytest.raises(ValueError, match="`factor` is 0"):
        Squeeze(0)
