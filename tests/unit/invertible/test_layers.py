"""What every layer promises: inverse both ways, log-determinant, gradients, guests' manners."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from recoup.invertible import InvertibleResidual


def flat(y: Any) -> Tensor:
    parts = y if isinstance(y, tuple) else (y,)
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def shaped(values: Tensor, like: Any) -> Any:
    """Cut flat `values` to the form of the output `like`."""
    if not isinstance(like, tuple):
        return values.view_as(like[: len(values)])
    pieces = values.split([part[0].numel() for part in like], dim=1)
    return tuple(piece.view(-1, *part.shape[1:]) for piece, part in zip(pieces, like, strict=True))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_each_direction_undoes_the_other(case):
    y, log_det = case.layer(case.x)
    x, back = case.layer.inverse(y)
    close(x, case.x)
    close(back, -log_det)
    latent = torch.randn_like(flat(y))
    x, back = case.layer.inverse(shaped(latent, y))
    again, log_det = case.layer(x)
    close(flat(again), latent)
    close(back, -log_det)


def test_gradients_of_a_batch_hold_each_samples_own_and_no_parameter_is_without(case):
    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y, log_det = case.layer(x)
        (flat(y).pow(3).sum() + log_det.sum()).backward()
        return x.grad

    close(gradient(case.x), torch.cat([gradient(case.x[:1]), gradient(case.x[1:])]))
    # A weight that the log-determinant does not depend on must still train.
    assert [name for name, p in case.layer.named_parameters() if p.grad is None] == []


def test_float32_stays_float32_under_autocast_too(case):
    layer, x = case.layer.float(), case.x.float()
    plain, of_plain = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, log_det = layer(x)
        back, _ = layer.inverse(y)
    for each in (plain, y):
        assert flat(each).dtype == log_det.dtype == of_plain.dtype == torch.float32
    for each in (layer.inverse(plain)[0], back):
        torch.testing.assert_close(each, x, rtol=1e-4, atol=1e-4)
    # Only the networks of couplings are rounded.
    if not hasattr(layer, "network") or isinstance(layer, InvertibleResidual):
        assert torch.equal(flat(y), flat(plain))
        assert torch.equal(log_det, of_plain)


def test_empty_batch(case):
    y, log_det = case.layer(case.x[:0])
    assert log_det.shape == (0,)
    assert case.layer.inverse(y)[0].shape == case.x[:0].shape


def test_a_call_leaves_input_stream_and_layer_as_they_were(case):
    # A log-determinant that is kept on the layer holds the graph of a call, and gets stale.
    before, x, state = dict(vars(case.layer)), case.x.clone(), torch.random.get_rng_state()
    version = case.x._version
    case.layer.inverse(case.layer(case.x)[0])
    assert vars(case.layer) == before
    assert case.x._version == version
    assert torch.equal(x, case.x)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_compute_the_same(case, duplicate):
    expected, _ = case.layer(case.x)
    actual, _ = duplicate(case.layer)(case.x)
    assert torch.equal(flat(actual), flat(expected))
