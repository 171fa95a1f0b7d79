"""Arguments and inputs that are refused: the call, and the words that name what is wrong."""

from __future__ import annotations

import math
from functools import partial

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
from recoup.schedules import sqrt
from tests.invertible_zoo import Says

# Couplings, and what a network returns for each value that they change.
KINDS = {AdditiveCoupling: 1, AffineCoupling: 2, MixtureCoupling: 26}


def on_grid(x, **options):
    coupling = AdditiveCoupling(nn.Identity(), exact=True, **options)
    return lambda: coupling(x)


def of_network(kind):
    return partial(kind, nn.Identity())


OF_COUPLINGS = {"condition": ["left"], "split": ["rows"]}
NO_ARGUMENTS = [  # what makes a layer, and values of arguments that are none
    (of_network(AffineCoupling), {**OF_COUPLINGS, "bound": [0]}),
    (of_network(AdditiveCoupling), {**OF_COUPLINGS, "fraction_bits": [21]}),
    (of_network(MixtureCoupling), {"num_components": [0]}),
    (partial(LipschitzLinear, 2, 2), {"coefficient": [0.0, 1.0, math.nan]}),
    (partial(LipschitzConv2d, 2, 2, 1), {"coefficient": [0.0, 1.0]}),
    (of_network(InvertibleResidual), {
        "log_det": ["trace"], "num_terms": [0], "max_iterations": [0],
        "continuation": [1.0], "tolerance": [0.0],
    }),
    (Logit, {"alpha": [-0.1, 0.5, math.nan]}),
    (Dequantize, {"levels": [0]}),
    (Flatten, {"shape": [(), (2, 0)]}),
    (Squeeze, {"factor": [0]}),
    (Permute, {"permutation": [[0, 0, 1], [1, 2, 3], [0, 2]]}),
    (adapt, {"transform": [42, None, nn.Linear, dist.AbsTransform(), dist.SoftmaxTransform()]}),
    (partial(Chain, Flip(), Flip()), {"memory": ["square", 0, 1.5, None, True]}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "values"), NO_ARGUMENTS)
def test_values_of_arguments_that_are_none(make, values):
    for name, each in values.items():
        for value in each:
            with pytest.raises(ValueError, match=f"`{name}` is "):
                make(**{name: value})


REFUSED = [
    # chains
    (lambda: Chain(Flip(), nn.Tanh()), r"`modules\[1\]` is a Tanh"),
    (lambda: Chain(Flip(), Flip(), memory=sqrt(3)), "for 3 stages, but the chain has 2"),
    (lambda: check_invertible(Flip(), torch.randn(2, 6), max_dims=5), "`max_dims` 5"),
    (lambda: check_invertible(Flip(), torch.randn(0, 3)), r"a batch \(N, ...\) is needed"),
    # adapters
    (lambda: adapt(dist.ExpTransform(cache_size=1)), "`transform` keeps its last value"),
    (lambda: recoup.train_in(Chain(ActNorm(2))),
     "`model` is a .*, in which there is no flow of zuko"),
    (lambda: recoup.train_in(42), r"`model` is 42, but must be an nn\.Module"),
    # couplings
    *((lambda kind=kind: kind(Says(0.0, num_channels=3))(torch.randn(1, 5)),
       f"Give it {2 * KINDS[kind]} output channels") for kind in KINDS),
    (lambda: AffineCoupling(nn.Identity())(torch.randn(1, 1, 4, 4)), "Squeeze"),
    (lambda: AffineCoupling(nn.Conv2d(1, 2, 1), split="checkerboard")(torch.randn(1, 1, 3, 4)),
     "a checkerboard needs .* even H and W"),
    (on_grid(torch.randn(2, 16).bfloat16()), r"torch.bfloat16, but with `exact`"),
    # blocks with a Lipschitz bound
    (lambda: InvertibleResidual(nn.Sequential(LipschitzLinear(2, 2), nn.Dropout())),
     "has a Dropout at `1`"),
    (lambda: InvertibleResidual(nn.Linear(2, 3))(torch.zeros(1, 2)),
     r"shape \(1, 3\).*same shape"),
    (lambda: InvertibleResidual(nn.Identity())(torch.zeros(1, 1, 16, 17)), "at most 256"),
    # preprocessing
    (lambda: Normalize(0.0, [1.0, 0.0]), "`std` may be 0"),
    (lambda: Normalize([0.0, 1.0], [1.0, 1.0, 1.0]), "2 and `std` 3"),
    (lambda: Dequantize(4)(torch.zeros(1, 2) * 1j), "grey levels are real"),
    (lambda: Normalize([0.0, 1.0], 1.0)(torch.randn(2, 4)), r"`x` has shape \(2, 4\)"),
    (lambda: VariationalDequantize(5, Chain(Squeeze()))(torch.zeros(2, 1, 4, 4)),
     "made noise of shape"),
    # layers that move values
    (lambda: Flatten((2, 2))(torch.zeros(1, 4)), r"`x` has shape \(1, 4\), .* needs \(N, 2, 2\)"),
    *((lambda shape=shape: Squeeze()(torch.randn(shape)), "`x` has shape .* `factor` 2")
      for shape in ((1, 1, 5, 4), (1, 1, 4, 5), (1, 4, 4))),
    (lambda: Squeeze().inverse(torch.randn(1, 6, 2, 2)), "multiple of 4"),
    (lambda: Split()(torch.randn(2, 1, 4)), r"`x` has shape \(2, 1, 4\), but Split needs"),
    (lambda: Permute([1, 0])(torch.randn(1, 4)), r"`x` has shape \(1, 4\)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_unsuitable_arguments_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("direction", ["forward", "inverse"])
@pytest.mark.parametrize(
    ("value", "words"),
    [(300.0, r"300.*below 256 only.*fewer `fraction_bits`"), (math.nan, "not finite")],
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
