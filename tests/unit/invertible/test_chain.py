from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import NotInvertibleError
from recoup.invertible import (
    ActNorm,
    AdditiveCoupling,
    Chain,
    Flip,
    InvertibleModule,
    InvertibleResidual,
    LipschitzLinear,
    Split,
)
from recoup.schedules import constant, sqrt
from tests.invertible_zoo import INVERTIBLE, invertible_chain_of, net
from tests.oracle import loss_of_all
from tests.zoo import leaf


@pytest.mark.parametrize("memory", ["linear", "constant", "sqrt"])
@pytest.mark.parametrize("name", sorted(INVERTIBLE))
def test_the_inverse_undoes_forward(name, memory):
    modules, x = invertible_chain_of(name)
    model = Chain(*modules, memory=memory)
    model(x)  # ActNorm starts
    model.eval()
    y, log_det = model(x)
    back, undone = model.inverse(y)
    torch.testing.assert_close(back, x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(log_det + undone, torch.zeros_like(log_det), rtol=0, atol=1e-9)
    assert log_det.shape == (len(x),)


@pytest.mark.parametrize("name", ["couplings", "glow", "multi-scale", "split first and last"])
def test_log_det_is_that_of_the_jacobian(name):
    modules, x = invertible_chain_of(name)
    model = Chain(*modules)
    model(x)
    model.eval()
    one = x[:1].detach()

    def flat(v):
        y, _ = model(v.view_as(one))
        parts = y if isinstance(y, tuple) else (y,)
        return torch.cat([part.flatten() for part in parts])

    jacobian = torch.autograd.functional.jacobian(flat, one.flatten())
    assert jacobian.shape == (one.numel(), one.numel())
    torch.testing.assert_close(model(one)[1][0], torch.linalg.slogdet(jacobian)[1])


def test_latents_come_in_the_order_they_were_split_off():
    chain = Chain(Split(), Split(), Flip())
    (first, second, last), _ = chain(torch.arange(8.0).view(1, 8))
    assert first.tolist() == [[4.0, 5.0, 6.0, 7.0]]
    assert second.tolist() == [[2.0, 3.0]]
    assert last.tolist() == [[1.0, 0.0]]


def test_what_is_not_invertible_is_refused():
    with pytest.raises(ValueError, match=r"`modules\[1\]` is a Tanh"):
        Chain(Flip(), nn.Tanh())


@pytest.mark.parametrize("memory", ["square", 0, 1.5, None, True])
def test_an_unknown_mode(memory):
    with pytest.raises(ValueError, match=r"`memory`|`slots`"):
        Chain(Flip(), Flip(), memory=memory)


def test_a_schedule_for_another_length():
    with pytest.raises(ValueError, match=r"for 3 stages, but the chain has 2"):
        Chain(Flip(), Flip(), memory=sqrt(3))
    with pytest.raises(ValueError, match=r"for 3 stages, but the chain has 2"):
        Chain(Flip(), Flip()).memory = constant(3)


def test_an_empty_chain_is_the_identity():
    x = leaf(4, 6)
    y, log_det = Chain(memory="constant")(x)
    assert torch.equal(x, y)
    assert log_det.dtype is x.dtype
    assert log_det.tolist() == [0.0] * 4


def test_a_loss_that_needs_no_chain():
    """A chain without parameters whose input asks for no gradient has nothing to do."""
    y, log_det = Chain(Flip(), Flip(), memory="constant")(torch.ones(2, 4))
    assert not y.requires_grad
    assert not log_det.requires_grad


def test_modes_by_assignment():
    torch.manual_seed(0)
    model, x = Chain(*(AdditiveCoupling(net(3, 3)).double() for _ in range(4))), leaf(4, 6)
    found = []
    for memory in ("linear", "constant", 2, "sqrt", constant(4), "linear"):
        model.memory = memory
        found.append(torch.autograd.grad(loss_of_all(model(x)), x)[0])
    for value in found[1:]:
        torch.testing.assert_close(value, found[0], rtol=1e-10, atol=1e-12)
    assert torch.equal(found[0], found[-1])


def test_an_error_of_invertibility_is_a_value_error():
    assert issubclass(NotInvertibleError, ValueError)


def test_constant_memory_says_what_it_recomputes():
    block = InvertibleResidual(nn.Sequential(LipschitzLinear(4, 4), nn.ELU()))
    chain = Chain(Flip(), block, Flip(), block)
    with pytest.warns(UserWarning, match=r"2 of 4 modules \(`1`, `3`\) are recomputed"):
        chain.memory = "constant"
    x = torch.randn(3, 4, requires_grad=True)
    y, log_det = chain(x)
    (y.square().sum() + log_det.sum()).backward()
    given, x.grad = x.grad, None
    chain.memory = "linear"
    y, log_det = chain(x)
    (y.square().sum() + log_det.sum()).backward()
    torch.testing.assert_close(given, x.grad)


# -- what stages return ----------------------------------------------------------------------------


class Doubles(InvertibleModule):
    """Returns, in either direction, what it is told to."""

    def __init__(self, forward=None, inverse=None):
        super().__init__()
        self.returns = {"forward": forward, "inverse": inverse}

    def pair(self, direction, x, log_det):
        change = self.returns[direction]
        return (x, log_det) if change is None else change(x, log_det)

    def forward(self, x):
        return self.pair("forward", 2 * x, x.new_full((len(x),), 4 * math.log(2)))

    def inverse(self, y):
        return self.pair("inverse", y / 2, y.new_full((len(y),), -4 * math.log(2)))


NO_PAIRS = {
    "no log-det": (lambda x, d: x, r"returned a tensor of shape \(2, 4\) and type torch.float32\."),
    "three": (lambda x, d: (x, d, d), "returned a tuple of 3 values"),
    "none": (lambda x, d: None, "returned a NoneType"),
    "turned round": (lambda x, d: (d, x), r"shape \(2, 4\).* as the log-determinant"),
    "a number": (lambda x, d: (x, 0.0), "a float as the log-determinant"),
    "a sum over the batch": (lambda x, d: (x, d.sum()), r"shape \(\) .* as the log-determinant"),
    "a number a value": (lambda x, d: (x, d[:, None]), r"shape \(2, 1\)"),
    "integers": (lambda x, d: (x, d.long()), "type torch.int64 on cpu as the log-determinant"),
    "complex": (lambda x, d: (x, d.to(torch.complex64)), "torch.complex64"),
    "another device": (lambda x, d: (x, d.to("meta")), "on meta as the log-determinant"),
    "another batch": (lambda x, d: (x.view(4, 2), d), r"shape \(4, 2\).* as the value"),
    "a tuple": (lambda x, d: ((x, x), d), "a tuple as the value|tuple of 2 values as the value"),
}


@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize("memory", ["linear", "sqrt", "constant"])
@pytest.mark.parametrize("name", NO_PAIRS)
def test_what_is_no_pair_names_the_stage(name, memory, direction):
    """R1: a forgotten log-determinant was taken apart along a batch of two."""
    change, words = NO_PAIRS[name]
    chain = Chain(Flip(), Doubles(**{direction: change}), Flip(), memory=memory)
    x, words = torch.ones(2, 4), rf"`{direction}` of module `1` \(Doubles\) (?s:.*){words}"
    if direction == "forward":
        with pytest.raises(ValueError, match=words):
            chain(x)
        return
    y, _ = chain(x.requires_grad_())
    with pytest.raises(ValueError, match=words):
        chain.inverse(y)
    if memory == "constant":
        module = Chain(ActNorm(4), *chain, memory=memory)
        y, log_det = module(x)
        with pytest.raises(ValueError, match=words.replace("`1`", "`2`")):
            (y.sum() + log_det.sum()).backward()


@pytest.mark.parametrize("memory", ["linear", "sqrt", "constant"])
def test_a_sequential_looks_at_pairs_too(memory):
    """R1: it would go on with the first sample alone."""
    model = recoup.Sequential(Doubles(forward=lambda x, d: x), nn.Flatten(), memory="linear")
    model.otherwise, model.memory = "keep", memory
    with pytest.raises(ValueError, match="`forward` of Doubles returned a tensor"):
        model(torch.ones(2, 4, requires_grad=True))
    with pytest.raises(ValueError, match="`forward` of Doubles returned a tensor"):
        recoup.segments_backward(
            [Doubles(forward=lambda x, d: x)], torch.ones(2, 4), torch.sum, recoup.GradStore()
        )


class ForwardOnly(InvertibleModule):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.w, self.w.abs().log().sum().expand(len(x))


class Density(ForwardOnly):
    inverts_in_backward = False


class Empty(InvertibleModule):
    def inverse(self, y):
        return y, y.new_zeros(len(y))


def test_a_missing_direction_is_said_when_the_chain_is_made():
    """R1: it was said in the backward of constant memory, or when the flow was sampled."""
    with pytest.raises(NotInvertibleError, match=r"`modules\[1\]` is a ForwardOnly.*inverts_in_b"):
        Chain(Flip(), ForwardOnly())
    with pytest.raises(ValueError, match=r"`modules\[0\]` is a Empty.*define `forward`"):
        Chain(Empty())
    with pytest.raises(NotInvertibleError, match=r"module `0` \(ForwardOnly\) has no inverse"):
        recoup.Sequential(ForwardOnly(), memory="constant")
    model = recoup.Sequential(ForwardOnly(), memory="constant", otherwise="recompute")
    model(torch.ones(2, 4)).sum().backward()


def test_a_density_that_is_not_sampled_trains_in_constant_memory():
    """R1: a module that is used forward only may say so."""
    x, found = torch.randn(3, 4), {}
    for memory in ("linear", "constant"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chain = Chain(Flip(), Density(), Flip(), Density(), memory=memory)
        y, log_det = chain(x)
        (y.square().sum() - log_det.sum()).backward()
        found[memory] = [p.grad for p in chain.parameters()]
    assert all(map(torch.equal, found["linear"], found["constant"]))
    with pytest.raises(NotImplementedError, match="Density does not define `inverse`") as caught:
        chain.inverse(y)
    assert "It is module `3` (Density) of the chain." in caught.value.__notes__


@pytest.mark.parametrize("memory", ["linear", "sqrt", "constant"])
def test_a_chain_that_splits_within_a_chain(memory):
    """R1: its inverse in linear memory joined the last latent with itself."""
    x = torch.randn(2, 8)
    for chain in (
        Chain(Chain(Split(), Flip()), memory=memory),
        Chain(Flip(), Chain(Split(), Flip()), Split(), Flip(), memory=memory),
        Chain(Chain(Split(), Chain(Split(), Flip())), ActNorm(2), memory=memory),
    ):
        y, _ = chain(x)
        plain = [each.clone() for each in y]
        assert sum(each.numel() for each in y) == x.numel()
        torch.testing.assert_close(chain.inverse(y)[0], x)
        chain.memory = "sqrt"
        for one, other in zip(chain(x)[0], plain, strict=True):
            torch.testing.assert_close(one, other)
