"""What the tests of every builder of flows share."""

from __future__ import annotations

import torch
from torch import nn

from recoup.invertible import ActNorm


def digits(n=6, shape=(1, 8, 8), levels=17):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(levels, (n, *shape), generator=generator).double()


def classes(n, num_classes):
    return torch.arange(n) % num_classes


def started(flow):
    """In double precision, with every ActNorm past its start."""
    for module in flow.modules():
        if isinstance(module, ActNorm):
            module.started = True
    return flow.double()


def filled(flow, std=0.3):
    """With random numbers of both signs for all parameters."""
    for parameter in flow.parameters():
        nn.init.normal_(parameter, std=std)
    return started(flow)


def stirred(flow, by=0.1):
    """A little off the start of training, where many networks say zero."""
    for parameter in flow.parameters():
        with torch.no_grad():
            parameter += by * torch.randn_like(parameter)
    return started(flow)


def loss_and_gradients(flow, x, labels=None):
    flow.zero_grad()
    torch.manual_seed(11)  # of noise and dropout
    loss = flow.bits_per_dim(x, labels).mean()
    loss.backward()
    missing = [name for name, p in flow.named_parameters() if p.grad is None]
    assert missing == []
    return loss.item(), {name: p.grad.clone() for name, p in flow.named_parameters()}


def assert_same_in_every_mode(flow, x, labels=None, tolerance=1e-8):
    """Loss, all named gradients and the random stream are those of linear memory."""
    loss, expected = loss_and_gradients(flow, x, labels)
    stream = torch.get_rng_state()
    assert any(gradient.abs().max() > 1e-3 for gradient in expected.values())
    for memory in ("constant", "sqrt", "log"):
        flow.memory = memory
        other_loss, actual = loss_and_gradients(flow, x, labels)
        assert abs(other_loss - loss) <= tolerance * abs(loss)
        assert torch.equal(torch.get_rng_state(), stream)
        assert list(actual) == list(expected)
        for name, gradient in expected.items():
            error = (actual[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-6)
            assert error <= tolerance, f"{name} in {memory}: {error}"
