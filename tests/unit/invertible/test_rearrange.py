"""Layers that move values: what `test_layers` does not ask of them."""

from __future__ import annotations

import pytest
import torch

from recoup.invertible import Flatten, Flip, Permute, Split, Squeeze

X = torch.arange(24.0).view(2, 3, 2, 2)
PIXELS = torch.arange(16.0).view(1, 1, 4, 4)
TO_DEPTH = torch.tensor(
    [[[0, 2], [8, 10]], [[1, 3], [9, 11]], [[4, 6], [12, 14]], [[5, 7], [13, 15]]]
)
ROWS = X.transpose(1, 2)  # not contiguous


@pytest.mark.parametrize(
    ("layer", "x", "wanted"),
    [
        (Flatten((3, 2, 2)), X, X.flatten(1)),
        (Flatten((2, 3, 2)), ROWS, ROWS.flatten(1)),
        (Squeeze(), PIXELS, TO_DEPTH[None].float()),  # space to depth, not a reshape
        (Split(), X, (X[:, :2], X[:, 2:])),  # the first part is the larger, and goes on
        (Split(-1), ROWS, (ROWS[..., :1], ROWS[..., 1:])),
        (Split(2), ROWS, (ROWS[:, :, :2], ROWS[:, :, 2:])),
        (Permute([2, 0, 1]), X, X[:, [2, 0, 1]]),  # channel i is the one named
        (Flip(), X, X[:, [2, 1, 0]]),
        (Flip(2), ROWS, ROWS[:, :, [2, 1, 0]]),
    ],
    ids=repr,
)
def test_where_values_go(layer, x, wanted):
    y, log_det = layer(x)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)
    back, inverse_log_det = layer.inverse(y)
    assert torch.equal(back, x)
    assert log_det.tolist() == inverse_log_det.tolist() == [0.0] * len(x)


def test_early_latent_does_not_hold_the_whole_input():
    for n in (1, 4):
        (_, z), _ = Split()(torch.randn(n, 4, 3))
        assert z.untyped_storage().nbytes() == z.numel() * 4


def test_random_order_follows_the_default_generator_and_a_loaded_one_changes_the_inverse_too():
    orders = []
    for _ in range(2):
        torch.manual_seed(0)
        orders.append(Permute(20).permutation.tolist())
    assert orders[0] == orders[1] != sorted(orders[0]) == list(range(20))
    layer = Permute([0, 1, 2])
    layer.load_state_dict(Permute([1, 2, 0]).state_dict())
    y, _ = layer(X)
    assert torch.equal(y, X[:, [1, 2, 0]])
    assert torch.equal(layer.inverse(y)[0], X)
