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
from recoup.schedules import constant, sqrt
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


LAYERS = (
    ActNorm(2), AdditiveCoupling(nn.Identity()), AdditiveCoupling(nn.Identity(), exact=True),
    AffineCoupling(nn.Conv2d(1, 2, 1), split="checkerboard"), Chain(), Chain(Flip()),
    Chain(Flip(), memory="constant"), Dequantize(4), Flatten((2,)), Flip(),
    InvertibleResidual(LipschitzLinear(2, 2)), Logit(), Normalize(0.0, 1.0),
    Normalize([0.0, 1.0], 1.0), Permute(2), Split(), Squeeze(),
    VariationalDequantize(4, Chain(Flip())),
)  # fmt: skip
REFUSED = [
    # chains
    (lambda: Chain(Flip(), nn.Tanh()), r"`modules\[1\]` is a Tanh"),
    (lambda: Chain(Flip(), Flip(), memory=sqrt(3)), "for 3 stages, but the chain has 2"),
    (lambda: setattr(Chain(Flip(), Flip()), "memory", constant(3)), "for 3 stages, .* has 2"),
    (lambda: check_invertible(Flip(), torch.randn(2, 6), max_dims=5), "`max_dims` 5"),
    *((lambda shape=shape: check_invertible(Flip(), torch.randn(shape)),
       r"a batch \(N, ...\) is needed") for shape in ((0, 3), (3,))),
    # adapters
    (lambda: adapt(dist.AbsTransform()), "not bijective"),
    (lambda: adapt(dist.ExpTransform(cache_size=1)), "`transform` keeps its last value"),
    *((lambda model=model: recoup.train_in(model),
       "`model` is a .*, in which there is no flow of zuko")
      for model in (nn.Sequential(nn.Linear(2, 2)), Chain(ActNorm(2)))),
    (lambda: recoup.train_in(42), r"`model` is 42, but must be an nn\.Module"),
    # couplings
    *((lambda kind=kind: kind(Says(0.0, num_channels=3))(torch.randn(1, 5)),
       f"Give it {2 * KINDS[kind]} output channels") for kind in KINDS),
    (lambda: AffineCoupling(nn.Identity())(torch.randn(1, 1, 4, 4)), "Squeeze"),
    (lambda: AffineCoupling(nn.Conv2d(1, 2, 1), split="checkerboard")(torch.randn(1, 1, 3, 4)),
     "a checkerboard needs .* even H and W"),
    (on_grid(torch.randn(2, 16).bfloat16()), r"torch.bfloat16, but with `exact`"),
    (on_grid(torch.ones(2, 16, dtype=torch.int64)), "torch.int64"),
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
    *((lambda stage=stage: VariationalDequantize(5, Chain(stage))(torch.zeros(2, 1, 4, 4)),
       "made noise of shape") for stage in (Squeeze(), Chain(Squeeze(), Split()))),
    # layers that move values
    (lambda: Flatten((2, 2))(torch.zeros(1, 4)), r"`x` has shape \(1, 4\), .* needs \(N, 2, 2\)"),
    (lambda: Flatten((2, 2)).inverse(torch.zeros(1, 5)),
     r"`y` has shape \(1, 5\), .* needs \(N, 4\)"),
    *((lambda shape=shape: Squeeze()(torch.randn(shape)), "`x` has shape .* `factor` 2")
      for shape in ((1, 1, 5, 4), (1, 1, 4, 5), (1, 4, 4))),
    (lambda: Squeeze().inverse(torch.randn(1, 6, 2, 2)), "multiple of 4"),
    (lambda: Split()(torch.randn(2, 1, 4)), r"`x` has shape \(2, 1, 4\), but Split needs"),
    (lambda: Flip()(torch.randn(4)), r"`x` has shape \(4,\), but Flip needs \(N, C"),
    (lambda: Permute([1, 0])(torch.randn(1, 4)), r"`x` has shape \(1, 4\)"),
    (lambda: Permute(0), "`permutation` is 0, but must be a whole number, at least 1"),
    (lambda: Split().inverse(torch.randn(2, 4)), "`y` has 1 parts, .* the pair"),
    *((lambda size=size: LipschitzConv2d(2, 2, size), "`kernel_size")
      for size in ((), (3, 3, 3), (3, 0))),
    (lambda: LipschitzConv2d(2, 2, 3, padding=()), "`padding` is "),
    *((lambda value=value: check_invertible(Flip(), torch.randn(2, 6), tolerance=value),
       "`tolerance` is ") for value in (-1, math.inf)),
    *((partial(getattr(layer, way), value), "`[xy]` is ")
      for layer in LAYERS for way in ("forward", "inverse")
      for value in (None, [1.0], "some")),
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
