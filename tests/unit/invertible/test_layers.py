"""What every layer promises: inverse both ways, log-determinant, gradients, guests' manners."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor


def flat(y: Any) -> Tensor:
    parts = y if isinstance(y, tuple) else (y,)
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_inverse_undoes_forward(case):
    y, log_det = case.layer(case.x)
    x, back = case.layer.inverse(y)
    close(x, case.x)
    close(back, -log_det)


def shaped(values: Tensor, like: Any) -> Any:
    """Cut flat `values` to the form of the output `like`."""
    if not isinstance(like, tuple):
        return values.view_as(like[: len(values)])
    pieces = values.split([part[0].numel() for part in like], dim=1)
    return tuple(piece.view(-1, *part.shape[1:]) for piece, part in zip(pieces, like, strict=True))


def log_abs_det(function: Any, x: Tensor) -> Tensor:
    jacobian = torch.autograd.functional.jacobian(function, x)
    return torch.linalg.slogdet(jacobian.reshape(x.numel(), x.numel())).logabsdet


def test_forward_undoes_inverse(case):
    like, _ = case.layer(case.x)
    latent = torch.randn_like(flat(like))
    x, back = case.layer.inverse(shaped(latent, like))
    again, log_det = case.layer(x)
    close(flat(again), latent)
    close(back, -log_det)


def test_log_det_is_that_of_the_autograd_jacobian(case):
    _, log_det = case.layer(case.x)
    assert log_det.shape == (2,)
    for i in range(2):
        close(log_det[i], log_abs_det(lambda v: flat(case.layer(v)[0]), case.x[i : i + 1]))


def test_log_det_of_the_inverse_is_that_of_the_autograd_jacobian(case):
    like, _ = case.layer(case.x)
    _, back = case.layer.inverse(like)
    y = flat(like)[:1].detach()
    close(back[0], log_abs_det(lambda v: case.layer.inverse(shaped(v, like))[0], y))


def test_gradients_pass_gradcheck_for_input_and_every_parameter(case):
    names = [name for name, _ in case.layer.named_parameters()]

    def call(x: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        parameters = dict(zip(names, values, strict=True))
        y, log_det = torch.func.functional_call(case.layer, parameters, (x,))
        return flat(y), log_det

    inputs = [case.x, *(p.detach() for p in case.layer.parameters())]
    assert torch.autograd.gradcheck(
        call, [v.clone().requires_grad_() for v in inputs], fast_mode=True
    )


def test_no_parameter_is_without_gradient(case):
    # A weight that the log-determinant does not depend on must still train.
    x = case.x.clone().requires_grad_()
    y, log_det = case.layer(x)
    (flat(y).pow(2).sum() + log_det.sum()).backward()
    missing = [name for name, p in case.layer.named_parameters() if p.grad is None]
    assert missing == []
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_gradient_of_a_batch_holds_each_samples_own(case):
    # A batch must not be cut to its first sample.
    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y, log_det = case.layer(x)
        return torch.autograd.grad(flat(y).pow(3).sum() + log_det.sum(), x)[0]

    whole = gradient(case.x)
    close(whole, torch.cat([gradient(case.x[:1]), gradient(case.x[1:])]))


def test_float32_stays_float32(case):
    layer, x = case.layer.float(), case.x.float()
    y, log_det = layer(x)
    assert flat(y).dtype == log_det.dtype == torch.float32
    torch.testing.assert_close(layer.inverse(y)[0], x, rtol=1e-4, atol=1e-4)


def test_empty_batch(case):
    y, log_det = case.layer(case.x[:0])
    assert log_det.shape == (0,)
    assert case.layer.inverse(y)[0].shape == case.x[:0].shape


def test_log_det_is_not_remembered_on_the_layer(case):
    # A cached log-determinant holds the graph of a call, and is stale after the next one.
    before = dict(vars(case.layer))
    case.layer(case.x)
    assert vars(case.layer) == before


def test_input_is_not_changed(case):
    x = case.x.clone()
    version = x._version
    case.layer(x)
    assert x._version == version
    assert torch.equal(x, case.x)


def test_random_stream_is_not_moved(case):
    state = torch.random.get_rng_state()
    case.layer.inverse(case.layer(case.x)[0])
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_compute_the_same(case, duplicate):
    expected, _ = case.layer(case.x)
    actual, _ = duplicate(case.layer)(case.x)
    assert torch.equal(flat(actual), flat(expected))
