"""Chains: the inverse and the log-determinant of the whole, memory modes, what stages return."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import distributions as dist
from torch import nn

import recoup
from recoup import invertible as inv
from recoup.errors import NotInvertibleError
from recoup.flows.networks import DenseNetwork
from tests.invertible_zoo import Scale
from tests.oracle import assert_same_step, loss_of_all, run_step
from tests.zoo import leaf


class ForwardOnly(inv.ActNorm):
    inverse = inv.InvertibleModule.inverse  # which is missing


class Density(ForwardOnly):
    inverts_in_backward = False  # is not sampled, and says so


def dense(inputs, outputs, **options):
    network = DenseNetwork(inputs, outputs, width=6, num_context=3, **options)
    nn.init.normal_(network[-1].weight, std=0.3)
    return network


def mixtures():
    coupling = partial(inv.MixtureCoupling, dense(2, 22, dropout=0.5), num_components=3)
    sides = "first", "second", "first"
    return [each for side in sides for each in (inv.ActNorm(4), coupling(condition=side))]


def with_splits():
    """Some of the networks take a context."""
    second = inv.AdditiveCoupling(dense(2, 2), nn.Linear(2, 2), condition="second")
    stages = [inv.AffineCoupling(dense(2, 4)), second, inv.Flip(), inv.Split()]
    return [*stages, inv.AffineCoupling(nn.Linear(1, 2)), inv.Split()]


def residual(log_det):
    conv = partial(inv.LipschitzConv2d, kernel_size=3, padding=1)
    first, second = (nn.Sequential(conv(2, 4), nn.ELU(), conv(4, 2)) for _ in range(2))
    block = partial(inv.InvertibleResidual, log_det=log_det)
    return [each for net in (first, second, first) for each in (inv.ActNorm(2), block(net))]


def learned_noise():
    """At 256 levels in float32: the noise cannot be had back from the sum."""
    side = {"condition": "second", "split": "checkerboard"}
    chain = inv.Chain(inv.ActNorm(1), inv.AffineCoupling(nn.Conv2d(1, 2, 3, padding=1), **side))
    return [inv.Flip(), inv.VariationalDequantize(256, chain), inv.ActNorm(1), inv.Flip()]


def adapted():
    loc = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    first, second = map(inv.adapt, [dist.AffineTransform(loc, 2.0, event_dim=1)] * 2)
    first.loc = loc  # of a transform, which is no module
    return [inv.ActNorm(4), first, second]


STAGES = {  # those of the first two are given a context
    "mixtures": (mixtures, lambda: leaf(5, 4)),
    "splits": (with_splits, lambda: leaf(5, 4)),
    **{f"residual, {log_det}": (lambda each=log_det: residual(each), lambda: leaf(3, 2, 3, 3))
       for log_det in ("exact", "series", "unbiased")},
    "learned noise": (learned_noise, lambda: torch.randint(256, (3, 1, 4, 4)).float()),
    "densities": (lambda: [inv.Flip(), Density(4), inv.Flip(), Density(4)], lambda: leaf(5, 4)),
    "adapted": (adapted, lambda: leaf(5, 4)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Under memory=.constant.:UserWarning")
@pytest.mark.parametrize("name", STAGES)
def test_gradients_are_those_of_linear_memory(name):
    make, of_x = STAGES[name]
    x = of_x()
    chain = inv.Chain(*make()).to(x.dtype)
    given, call = [x, *([leaf(len(x), 3)] if chain.takes_context else [])], lambda f, x: f(*x)
    want = run_step(chain, given, call=call)
    assert all(gradient.abs().sum() > 0 for gradient in want.gradients.values())
    rtol = 0.0 if name == "learned noise" else 1e-10
    for memory in ("sqrt", 1, "constant"):
        assert_same_step(run_step(chain, given, call=call, memory=memory), want, rtol)


@pytest.mark.parametrize("memory", ["linear", "sqrt", "constant"])
def test_latents_come_in_the_order_they_were_split_off_within_inner_chains_too(memory):
    x, inner = torch.arange(8.0).view(1, 8), inv.Chain(inv.Split())
    whole = inv.Split(), inv.Split(), inv.Flip()
    for stages in (whole, (inv.Flip(), inv.Flip(), inv.Chain(inner, *whole[1:]))):
        chain = inv.Chain(*stages, memory=memory)
        y, _ = chain(x)
        found = [each.flatten().tolist() for each in y]
        assert found == [[4.0, 5.0, 6.0, 7.0], [2.0, 3.0], [1.0, 0.0]]
        torch.testing.assert_close(chain.inverse(y)[0], x)


NO_PAIRS = [
    (lambda _, x, d: x, r"returned a tensor of shape \(2, 3\) and type torch.float32\."),
    (lambda _, x, d: None, "returned a NoneType"),
    (lambda _, x, d: (d, x), r"shape \(2, 3\).* as the log-determinant"),
    (lambda _, x, d: (x, d.sum()), r"shape \(\) .* as the log-determinant"),
    (lambda _, x, d: (x, d.long()), "type torch.int64 on cpu as the log-determinant"),
    (lambda _, x, d: (x, d.to("meta")), "on meta as the log-determinant"),
    (lambda _, x, d: (x.view(3, 2), d), r"shape \(3, 2\).* as the value"),
    (lambda _, x, d: ((x, x), d), "tuple (of 2 values )?as the value"),
]


@pytest.mark.parametrize(("change", "expected"), NO_PAIRS)
def test_what_is_no_pair_names_the_stage(change, expected):
    x, words = torch.ones(2, 3), rf" of module `1` \(Scale\) (?s:.*){expected}"
    for memory in ("linear", "constant"):
        with pytest.raises(ValueError, match=f"`forward`{words}"):
            inv.Chain(inv.Flip(), Scale(forward=change), inv.Flip(), memory=memory)(x)
        chain = inv.Chain(inv.ActNorm(3), Scale(inverse=change), inv.Flip(), memory=memory)
        y, log_det = chain(x.requires_grad_())
        with pytest.raises(ValueError, match=f"`inverse`{words}"):
            chain.inverse(y)
        if memory == "constant":
            with pytest.raises(ValueError, match=f"`inverse`{words}"):
                (y.sum() + log_det.sum()).backward()


def test_a_missing_direction_is_said_when_the_chain_is_made():
    assert issubclass(NotInvertibleError, ValueError)
    with pytest.raises(NotInvertibleError, match=r"`modules\[1\]` is a ForwardOnly.*inverts_in_b"):
        inv.Chain(inv.Flip(), ForwardOnly(4))
    with pytest.raises(ValueError, match=r"`modules\[0\]` is a Empty.*define `forward`"):
        inv.Chain(type("Empty", (inv.Flip,), {"forward": inv.InvertibleModule.forward})())
    with pytest.raises(NotInvertibleError, match=r"module `0` \(ForwardOnly\) has no inverse"):
        recoup.Sequential(ForwardOnly(4), memory="constant")
    chain = inv.Chain(inv.Flip(), inv.Flip(), inv.Flip(), Density(4))  # is sampled after all
    with pytest.raises(NotImplementedError, match="Density does not define `inverse`") as caught:
        chain.inverse(torch.ones(2, 4))
    assert "It is module `3` (Density) of the chain." in caught.value.__notes__


def test_transforms_of_torch_keep_the_contract():
    x, loc, scale = (torch.randn(n, 4, dtype=torch.float64) for n in (3, 1, 1))
    adapted = [*map(inv.adapt, (
        dist.IndependentTransform(dist.AffineTransform(loc[0], scale[0].exp()), 1),
        dist.ComposeTransform([dist.ExpTransform(), dist.ExpTransform().inv]),
        dist.SigmoidTransform(), dist.AffineTransform(-0.5, 3.0).inv,
    ))]  # fmt: skip
    for layer in (*adapted, inv.Chain(*adapted)):
        assert inv.check_invertible(layer, x)
    # One that saturates is recomputed.
    assert [layer.inverts_in_backward for layer in adapted] == [True, True, False, True]
    assert "recomputed: its inverse is not known to be cheap and exact" in repr(adapted[2])
    assert inv.adapt(adapted[0]) is adapted[0]


def test_a_norm_that_was_frozen_before_counts_once():
    nets = [nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(3)]
    chain = inv.Chain(
        *(layer for net in nets for layer in (inv.AffineCoupling(net), inv.Flip()))
    ).double()

    def three_steps(chain, x):
        for is_training in (False, True):
            for coupling in chain[::2]:
                coupling.network[1].train(is_training)
            loss_of_all(chain(x)).backward()
        return chain(x)

    x = leaf(16, 4)
    want = run_step(chain, x, call=three_steps)
    assert_same_step(run_step(chain, x, call=three_steps, memory="constant"), want, rtol=1e-10)
