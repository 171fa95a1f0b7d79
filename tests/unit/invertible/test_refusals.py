"""Arguments and inputs that are refused: the call, and the words that name what is wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributions as dist
from torch import nn

import recoup
from recoup.errors import GridError
from recoup.invertible import (
    ActNorm,
    AdditiveCoupling,
    AffineCoupling,
    Chain,
    Dequantize,
    Flatten,
    Flip,
    InvertibleResidual,
    LipschitzConv2d,
    LipschitzLinear,
    Logit,
    MixtureCoupling,
    Normalize,
    Permute,
    Split,
    Squeeze,
    VariationalDequantize,
    adapt,
    check_invertible,
)
from recoup.schedules import constant, sqrt
from tests.invertible_zoo import Says

# Couplings, and what a network returns for each value that they change.
KINDS = {AdditiveCoupling: 1, AffineCoupling: 2, MixtureCoupling: 26}


def no_parameter(build, **given):
    (name, value), *_ = given.items()
    return lambda: build(nn.Identity(), **given), f"`{name}` is {value!r}"


def on_grid(x, **options):
    coupling = AdditiveCoupling(nn.Identity(), exact=True, **options)
    return lambda: coupling(x)


def memory(value):
    return lambda: Chain(Flip(), Flip(), memory=value)


def assign(value):
    Chain(Flip(), Flip()).memory = value


REFUSED = [
    # chains
    (lambda: Chain(Flip(), nn.Tanh()), r"`modules\[1\]` is a Tanh"),
    *((memory(value), "`memory`|`slots`") for value in ("square", 0, 1.5, None, True)),
    (memory(sqrt(3)), "for 3 stages, but the chain has 2"),
    (lambda: assign(constant(3)), "for 3 stages, but the chain has 2"),
    (lambda: check_invertible(Flip(), torch.randn(2, 6), max_dims=5), "`max_dims` 5"),
    *((lambda shape=shape: check_invertible(Flip(), torch.randn(shape)),
       r"a batch \(N, ...\) is needed") for shape in ((0, 3), (3,))),
    # adapters
    *((lambda value=value: adapt(value), "`transform` is .*, but must be a layer of zuko")
      for value in (42, None, nn.Linear(2, 2), nn.Linear, "zuko")),
    *((lambda value=value: adapt(value), "`transform` is .*not bijective")
      for value in (dist.AbsTransform(), dist.SoftmaxTransform())),
    (lambda: adapt(dist.ExpTransform(cache_size=1)), "`transform` keeps its last value"),
    *((lambda model=model: recoup.train_in(model),
       "`model` is a .*, in which there is no flow of zuko")
      for model in (nn.Sequential(nn.Linear(2, 2)), Chain(ActNorm(2)))),
    (lambda: recoup.train_in(42), r"`model` is 42, but must be an nn\.Module"),
    # couplings
    *((lambda kind=kind: kind(Says(0.0, num_channels=3))(torch.randn(1, 5)),
       f"Give it {2 * KINDS[kind]} output channels") for kind in KINDS),
    (lambda: MixtureCoupling(nn.Linear(1, 3), num_components=4)(torch.randn(1, 2)),
     "Give it 14 output channels"),
    *((lambda kind=kind: kind(nn.Identity())(torch.randn(1, 1, 4, 4)), "Squeeze")
      for kind in KINDS),
    *(no_parameter(kind, condition="left") for kind in KINDS),
    *(no_parameter(kind, split="rows") for kind in KINDS),
    no_parameter(AffineCoupling, bound=0),
    *(no_parameter(MixtureCoupling, **{name: value})
      for name, value in (("num_components", 0), ("bound", 0.0), ("least_slope", 0.0))),
    (lambda: AffineCoupling(nn.Conv2d(1, 2, 1), split="checkerboard")(torch.randn(1, 1, 3, 4)),
     "a checkerboard needs .* even H and W"),
    (lambda: AdditiveCoupling(nn.Identity(), exact=True, fraction_bits=21),
     "`fraction_bits` is 21"),
    (on_grid(torch.randn(2, 16).bfloat16()), r"torch.bfloat16, but with `exact`"),
    (on_grid(torch.ones(2, 16, dtype=torch.int64)), "torch.int64"),
    # blocks with a Lipschitz bound
    *((lambda build=build, size=size, value=value: build(2, 2, *size, coefficient=value),
       "`coefficient` is") for build, size in ((LipschitzLinear, ()), (LipschitzConv2d, (1,)))
      for value in (0.0, 1.0, -0.5, math.nan)),
    no_parameter(InvertibleResidual, log_det="trace"),
    *(no_parameter(InvertibleResidual, **{name: 0})
      for name in ("num_terms", "num_probes", "max_iterations")),
    no_parameter(InvertibleResidual, continuation=1.0),
    no_parameter(InvertibleResidual, tolerance=0.0),
    (lambda: InvertibleResidual(nn.Sequential(LipschitzLinear(2, 2), nn.Dropout())),
     "has a Dropout at `1`"),
    (lambda: InvertibleResidual(nn.BatchNorm1d(2)), "has a BatchNorm1d"),
    (lambda: InvertibleResidual(nn.Linear(2, 3))(torch.zeros(1, 2)),
     r"shape \(1, 3\).*same shape"),
    (lambda: InvertibleResidual(nn.Identity())(torch.zeros(1, 1, 16, 17)), "at most 256"),
    # preprocessing
    (lambda: Normalize(0.0, [1.0, 0.0]), "`std` may be 0"),
    (lambda: Normalize(math.nan, 1.0), "finite"),
    (lambda: Normalize([0.0, 1.0], [1.0, 1.0, 1.0]), "2 and `std` 3"),
    (lambda: Normalize([0.0, 1.0], 1.0)(torch.randn(2, 4)), r"`x` has shape \(2, 4\)"),
    (lambda: Normalize(0.0, 1.0)(torch.randn(2)), r"`x` has shape \(2,\)"),
    *((lambda alpha=alpha: Logit(alpha), "`alpha` is") for alpha in (-0.1, 0.5, math.nan)),
    (lambda: Dequantize(0), "`levels` is 0"),
    (lambda: Dequantize(256)(torch.full((1, 2), 300)), r"from 300 to 300.*Use `levels` 301"),
    *((lambda stage=stage: VariationalDequantize(5, Chain(stage))(torch.zeros(2, 1, 4, 4)),
       "made noise of shape") for stage in (Squeeze(), Split(dim=2))),
    # layers that move values
    (lambda: Flatten(()), r"`shape` is \(\)"),
    (lambda: Flatten((2, 0)), r"`shape` is \(2, 0\)"),
    (lambda: Flatten((2, 2))(torch.zeros(1, 4)), r"`x` has shape \(1, 4\), .* needs \(N, 2, 2\)"),
    (lambda: Flatten((2, 2)).inverse(torch.zeros(1, 5)),
     r"`y` has shape \(1, 5\), .* needs \(N, 4\)"),
    (lambda: Squeeze(0), "`factor` is 0"),
    *((lambda shape=shape: Squeeze()(torch.randn(shape)), "`x` has shape .* `factor` 2")
      for shape in ((1, 1, 5, 4), (1, 1, 4, 5), (1, 4, 4))),
    (lambda: Squeeze().inverse(torch.randn(1, 6, 2, 2)), "multiple of 4"),
    (lambda: Split(0), "`dim` is 0"),
    *((lambda dim=dim: Split(dim)(torch.randn(2, 1, 4)), f"`dim` {dim}") for dim in (1, 3, -4)),
    (lambda: Split(-3)(torch.randn(2, 4, 4)), "`dim` -3 is the batch"),
    (lambda: Flip(0), "`dim` is 0"),
    (lambda: Flip(-2)(torch.randn(2, 4)), "`dim` -2 is the batch"),
    *((lambda order=order: Permute(order), "`permutation` is")
      for order in ([0, 0, 1], [1, 2, 3], [0, 2])),
    (lambda: Permute([1, 0])(torch.randn(1, 4)), r"`x` has shape \(1, 4\)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_unsuitable_arguments_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize(
    ("value", "words"),
    [(300.0, r"300.*below 256 only.*`fraction_bits=15`"), (math.nan, "not finite")],
)
def test_values_that_the_grid_does_not_hold_are_an_error(value, words, direction):
    x = torch.zeros(2, 16)
    x[0, 15] = value
    coupling = AdditiveCoupling(nn.Identity(), exact=True, fraction_bits=16)
    with pytest.raises(GridError, match=words) as caught:
        getattr(coupling, direction)(x)
    assert "AdditiveCoupling" in str(caught.value)
    if value == 300.0:
        coupling.fraction_bits = 15
        getattr(coupling, direction)(x)
