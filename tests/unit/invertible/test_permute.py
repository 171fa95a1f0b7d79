from __future__ import annotations

import pytest
import torch

from recoup.invertible import Flip, Permute


def test_channel_i_of_the_output_is_the_one_named():
    x = torch.randn(2, 3, 4)
    y, _ = Permute([2, 0, 1])(x)
    assert torch.equal(y, x[:, [2, 0, 1]])


def test_random_order_is_a_permutation_and_follows_the_default_generator():
    torch.manual_seed(0)
    first = Permute(20)
    torch.manual_seed(0)
    assert torch.equal(first.permutation, Permute(20).permutation)
    assert sorted(first.permutation.tolist()) == list(range(20))
    assert first.permutation.tolist() != list(range(20))


def test_loaded_order_also_changes_the_inverse():
    layer = Permute([0, 1, 2])
    layer.load_state_dict(Permute([1, 2, 0]).state_dict())
    x = torch.randn(2, 3)
    y, _ = layer(x)
    assert torch.equal(y, x[:, [1, 2, 0]])
    assert torch.equal(layer.inverse(y)[0], x)


@pytest.mark.parametrize("order", [[0, 0, 1], [1, 2, 3], [0, 2]])
def test_what_is_no_permutation_is_refused(order):
    with pytest.raises(ValueError, match="`permutation` is"):
        Permute(order)


def test_other_channels_are_refused():
    with pytest.raises(ValueError, match=r"`x` has shape \(1, 4\)"):
        Permute([1, 0])(torch.randn(1, 4))


def test_flip_reverses_one_dimension():
    x = torch.randn(2, 3, 4)
    assert torch.equal(Flip()(x)[0], x[:, [2, 1, 0]])
    assert torch.equal(Flip(2)(x)[0], x[:, :, [3, 2, 1, 0]])


def test_flip_of_the_batch_is_refused():
    with pytest.raises(ValueError, match="`dim` is 0"):
        Flip(0)
    with pytest.raises(ValueError, match="`dim` -2 is the batch"):
        Flip(-2)(torch.randn(2, 4))
