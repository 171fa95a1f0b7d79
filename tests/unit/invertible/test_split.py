from __future__ import annotations

import pytest
import torch

from recoup.invertible import Split


def test_first_part_goes_on_and_is_the_larger():
    x = torch.randn(2, 5, 3)
    (h, z), log_det = Split()(x)
    assert torch.equal(h, x[:, :3])
    assert torch.equal(z, x[:, 3:])
    assert log_det.tolist() == [0.0, 0.0]


def test_early_latent_does_not_hold_the_whole_input():
    for n in (1, 4):
        (_, z), _ = Split()(torch.randn(n, 4, 3))
        assert z.untyped_storage().nbytes() == z.numel() * 4


@pytest.mark.parametrize("dim", [-1, 2])
def test_other_dimensions(dim):
    x = torch.randn(2, 5, 4)
    y, _ = Split(dim)(x)
    assert y[0].shape == (2, 5, 2)
    assert torch.equal(Split(dim).inverse(y)[0], x)


def test_unsuitable_dimensions_are_refused():
    with pytest.raises(ValueError, match="`dim` is 0"):
        Split(0)
    for dim in (1, 3, -4):
        with pytest.raises(ValueError, match=f"`dim` {dim}"):
            Split(dim)(torch.randn(2, 1, 4))
    with pytest.raises(ValueError, match="`dim` -3 is the batch"):
        Split(-3)(torch.randn(2, 4, 4))
