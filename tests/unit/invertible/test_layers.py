"""What every layer promises: inverse both ways, log-determinant, gradients, guests' manners."""

from __future__ import annotations

import copy
import pickle
from typing import Any

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


def test_each_direction_undoes_the_other_and_leaves_input_stream_and_layer_as_they_were(case):
    layer, x = case
    # A log-determinant that is kept on the layer holds the graph of a call, and gets stale.
    before, version, same = dict(vars(layer)), x._version, x.clone()
    state = torch.random.get_rng_state()
    y, log_det = layer(x)
    back, undone = layer.inverse(y)
    assert vars(layer) == before
    assert x._version == version
    assert torch.equal(x, same)
    assert torch.equal(torch.random.get_rng_state(), state)
    close(back, x)
    close(undone, -log_det)
    latent = torch.randn_like(flat(y))
    x, undone = layer.inverse(shaped(latent, y))
    again, log_det = layer(x)
    close(flat(again), latent)
    close(undone, -log_det)
    empty, log_det = layer(x[:0])
    assert log_det.shape == (0,)
    assert layer.inverse(empty)[0].shape == x[:0].shape


def test_gradients_of_a_batch_hold_each_samples_own_and_no_parameter_is_without(case):
    layer, x = case

    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y, log_det = layer(x)
        (flat(y).pow(3).sum() + log_det.sum()).backward()
        return x.grad

    close(gradient(x), torch.cat([gradient(x[:1]), gradient(x[1:])]))
    # A weight that the log-determinant does not depend on must still train.
    assert [name for name, p in layer.named_parameters() if p.grad is None] == []


def test_float32_stays_float32_under_autocast_too_and_copies_compute_the_same(case):
    layer, x = case[0].float(), case[1].float()
    plain, of_plain = layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(flat(twin(x)[0]), flat(plain))
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
