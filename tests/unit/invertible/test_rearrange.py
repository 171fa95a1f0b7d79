"""Layers that move values: what `test_layers` does not ask of them."""

from __future__ import annotations

import pytest
import torch

from recoup.invertible import Flatten, Flip, Permute, Split, Squeeze


def test_order_is_that_of_memory():
    x = torch.arange(24.0).view(2, 3, 2, 2)
    y, log_det = Flatten((3, 2, 2))(x)
    assert torch.equal(y, torch.arange(24.0).view(2, 12))
    assert log_det.tolist() == [0.0, 0.0]
    back, log_det = Flatten((3, 2, 2)).inverse(y)
    assert torch.equal(back, x)
    assert log_det.tolist() == [0.0, 0.0]


def test_input_that_is_not_contiguous():
    x = torch.randn(2, 4, 3).transpose(1, 2)
    layer = Flatten((3, 4))
    y, _ = layer(x)
    assert torch.equal(layer.inverse(y)[0], x)


def test_unsuitable_arguments_are_refused():
    with pytest.raises(ValueError, match=r"`shape` is \(\)"):
        Flatten(())
    with pytest.raises(ValueError, match=r"`shape` is \(2, 0\)"):
        Flatten((2, 0))
    with pytest.raises(ValueError, match=r"`x` has shape \(1, 4\), .* needs \(N, 2, 2\)"):
        Flatten((2, 2))(torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"`y` has shape \(1, 5\), .* needs \(N, 4\)"):
        Flatten((2, 2)).inverse(torch.zeros(1, 5))


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
