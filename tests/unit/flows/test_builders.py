"""What every builder of flows promises, whatever it builds, and the layers that it builds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from recoup.flows import Logistic
from recoup.invertible import (
    ActNorm,
    AdditiveCoupling,
    InvertibleConv1x1LU,
    InvertibleResidual,
    LipschitzConv2d,
    VariationalDequantize,
)
from recoup.invertible.contract import as_tuple
from tests.oracle import assert_same_step
from tests.unit.flows.models import (
    BUILDERS,
    SMALL,
    VECTOR,
    built,
    classes,
    digits,
    filled,
    started,
    step_of,
    stirred,
)


@pytest.mark.filterwarnings("ignore:Under memory=.constant.:UserWarning")
@pytest.mark.parametrize(
    ("name", "shape", "options", "is_first"),  # with the start of ActNorms
    [
        ("nice", SMALL, {"exact": False, "dropout": 0.4, "num_classes": 3}, False),
        ("realnvp", SMALL, {"dropout": 0.4}, True),
        ("glow", SMALL, {"dropout": 0.5}, False),
        ("flow++", SMALL, {"dropout": 0.4, "num_classes": 3, "variational": True}, True),
        ("flow++", VECTOR, {"dropout": 0.4, "num_classes": 3}, False),
        ("iresnet", SMALL, {"log_det": "unbiased", "num_terms": 3}, True),
    ],
    ids=str,
)
def test_gradients_are_those_of_linear_memory_with_dropout_too(name, shape, options, is_first):
    flow = stirred(built(name, shape, **options))
    for module in flow.modules() if is_first else ():
        if isinstance(module, ActNorm):
            module.started = False
    assert any(isinstance(m, nn.Dropout) for m in flow.modules()) is ("dropout" in options)
    given = digits(shape=shape), classes(6, 3) if "num_classes" in options else None
    want = step_of(flow, *given)
    assert all(gradient is not None for gradient in want.gradients.values())
    assert max(gradient.abs().max() for gradient in want.gradients.values()) > 1e-3
    for memory in ("constant", "sqrt", "log"):
        assert_same_step(step_of(flow, *given, memory), want, rtol=1e-8)


@pytest.mark.parametrize(
    ("name", "options", "latents"),
    [
        ("nice", {}, [(64,)]),
        ("nice", {"exact": True, "num_classes": 4}, [(64,)]),
        ("realnvp", {}, [(2, 4, 4), (2, 4, 4)]),
        ("glow", {}, [(2, 4, 4), (8, 2, 2)]),
        ("flow++", {"variational": False}, [(4, 4, 4)]),
        ("flow++", {"variational": True}, [(4, 4, 4)]),
        ("iresnet", {"num_levels": 2}, [(16, 2, 2)]),
    ],
    ids=str,
)
def test_digits_of_17_levels(name, options, latents):
    flow, x = stirred(built(name, **options)).eval(), digits(5)
    labels = classes(5, 4) if "num_classes" in options else None
    assert flow.levels == 17
    assert flow.bits_per_dim(x, labels).isfinite().all()
    assert [z.shape[1:] for z in as_tuple(flow(x, labels)[0])] == latents
    assert torch.equal(flow.reconstruct(x, labels), x)
    samples = flow.sample(5, labels=labels, temperature=0.7)
    assert samples.shape == (5, 1, 8, 8)
    assert set(samples.flatten().tolist()) <= set(range(17))


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in BUILDERS if name != "iresnet"), ("glow", {"coupling": "additive"})],
)
def test_every_coupling_sees_the_label(name, options):
    flow = filled(built(name, SMALL, num_classes=3, **options))
    couplings = [stage for stage in flow.chain if stage.takes_context]
    assert len(couplings) == sum(hasattr(stage, "network") for stage in flow.chain)
    # A label that is not seen by one network would leave its column of weights without gradient.
    flow.bits_per_dim(digits(3, SMALL), classes(3, 3)).sum().backward()
    for stage in couplings:
        of_labels = stage.network[0].weight.grad[:, -3:].transpose(0, 1).flatten(1)
        assert (of_labels != 0).any(1).all()


NORM, MIX = "ActNorm", "InvertibleConv1x1"
BOARD, BOARD_2 = ("checkerboard", "first"), ("checkerboard", "second")
HALVES, HALVES_2 = ("channels", "first"), ("channels", "second")
SCALE = "Squeeze", *(NORM, "InvertibleResidual") * 2
BOARDS = NORM, BOARD, NORM, BOARD_2, NORM, BOARD


@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        ("realnvp", {"num_steps": 3},
         ["Logit", *BOARDS, "Squeeze", NORM, HALVES, NORM, HALVES_2, NORM, HALVES, "Split",
          *BOARDS]),
        ("flow++", {"num_steps": 1},
         ["Logit", NORM, BOARD, "Squeeze", NORM, MIX, HALVES, NORM, MIX, BOARD]),
        # The mixing takes the place of turns: every coupling changes the second half.
        ("glow", {"alpha": None, "num_steps": 1},
         ["Normalize", "Squeeze", NORM, MIX, HALVES, "Split", "Squeeze", NORM, MIX, HALVES]),
        ("iresnet", {"num_levels": 2}, ["Logit", *SCALE, *SCALE, NORM]),
        ("iresnet", {"alpha": None, "num_steps": 1}, ["Normalize", *SCALE[:3], NORM]),
    ],
    ids=str,
)  # fmt: skip
def test_the_order_of_the_layers(name, options, kinds):
    stages = built(name, **options).chain
    found = [(s.split, s.condition) if hasattr(s, "split") else type(s).__name__ for s in stages]
    assert found == kinds


def test_options_choose_the_layers():
    flow = built("glow", coupling="additive", conv1x1="lu")
    kinds = [type(stage) for stage in flow.chain]
    assert kinds.count(AdditiveCoupling) == kinds.count(InvertibleConv1x1LU) == 4
    for name in ("nice", "realnvp", "glow", "flow++"):
        flow = built(name, dropout=0.2)
        num_networks = sum(hasattr(stage, "network") for stage in flow.chain)
        assert sum(isinstance(m, nn.Dropout) for m in flow.modules()) == num_networks
    flow = built("iresnet", num_levels=2, coefficient=0.7, num_terms=5)
    blocks = [stage for stage in flow.chain if isinstance(stage, InvertibleResidual)]
    assert {(block.log_det, block.num_terms) for block in blocks} == {("unbiased", 5)}
    assert all(0.7**6 < block.continuation == 0.5 for block in blocks)
    layers = [layer for layer in flow.modules() if isinstance(layer, LipschitzConv2d)]
    assert [layer.kernel_size[0] for layer in layers[:3]] == [3, 1, 3]
    assert {layer.coefficient for layer in layers} == {0.7}
    plane = built("iresnet", (2,), levels=None, coefficient=0.95).chain[1]
    assert plane.continuation == pytest.approx(0.95**3)
    assert plane.log_det == "exact"
    assert isinstance(built("flow++", variational=True).dequantize, VariationalDequantize)
    assert [s.exact for s in built("nice", exact=True).chain if hasattr(s, "exact")] == [True] * 4
    assert isinstance(built("nice").base.distribution(), Logistic)
    assert isinstance(built("nice", base=Normal(0.0, 1.0)).base.distribution(), Normal)


def test_even_and_odd_entries_of_nice_take_turns_and_its_end_scales():
    flow = filled(built("nice", (6,), levels=None, num_couplings=1))
    x = torch.randn(1, 6, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda v: flow(v)[0], x)[0, :, 0]
    # latents: the even entries alone, and then the odd ones, which see all even ones
    assert ((jacobian[:3] != 0).nonzero()[:, 1] == torch.tensor([0, 2, 4])).all()
    assert (jacobian[3:, [0, 2, 4]] != 0).all()
    assert ((jacobian[3:, [1, 3, 5]] != 0) == torch.eye(3, dtype=torch.bool)).all()
    torch.testing.assert_close(flow(x)[1], flow.chain[-1].log_scale.sum()[None])


@pytest.mark.parametrize("levels", [2, 3, 17, 256])
def test_no_level_is_rounded_to_the_next(levels):
    x = torch.arange(64 * 800).view(-1, 8, 8) % levels
    for exact in (False, True):  # flows that start as an identity
        flow = built("nice", (8, 8), levels=levels, exact=exact).eval()
        assert torch.equal(flow.reconstruct(x), x.float())


def test_glow_starts_as_a_norm_and_a_rotation():
    latents, _ = built("glow", num_levels=1)(digits(200).float())
    assert latents.var().item() == pytest.approx(1.0, abs=0.02)
    flow = started(built("glow", levels=None)).eval()
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(flow.reconstruct(x), x)
    # rotations and identities: the density is that of the base
    torch.testing.assert_close(
        flow.log_prob(x), -0.5 * (x.square() + math.log(2 * math.pi)).flatten(1).sum(1)
    )


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        *((name, SMALL, {option: 0}, f"`{option}` is 0")
          for name, option in (("nice", "num_couplings"), ("realnvp", "num_steps"),
                               ("glow", "num_levels"), ("flow++", "num_components"),
                               ("iresnet", "depth"))),
        ("nice", (1,), {}, r"`shape` is \(1,\)"),
        ("nice", (), {}, r"`shape` is \(\)"),
        ("nice", SMALL, {"levels": 131072, "exact": True}, "`levels` is 131072, but with `exact`"),
        ("nice", (4,), {"num_couplings": 20_000}, "`num_couplings` is 20000, but .* most 10,000"),
        ("realnvp", (1,), {}, "at least 2 values"),
        ("realnvp", (8, 8), {}, r"`shape` is \(8, 8\)"),
        ("glow", (5,), {}, r"`shape` is \(5,\)"),
        ("glow", (1, 8, 8), {"num_levels": 4}, "multiples of 16"),
        ("glow", SMALL, {"coupling": "linear"}, "`coupling` is 'linear'"),
        ("glow", SMALL, {"conv1x1": "qr"}, "`conv1x1` is 'qr'"),
        ("flow++", SMALL, {"variational": True, "levels": None}, "`variational` is for images"),
        ("flow++", VECTOR, {"variational": True}, "`variational` is for images"),
        ("flow++", SMALL, {"variational": "no"}, "`variational` is 'no'"),
        ("iresnet", (2,), {"num_levels": 2}, "`num_levels` 1"),
        ("iresnet", SMALL, {"coefficient": 1.0}, "`coefficient` is 1.0"),
    ],
    ids=str,
)  # fmt: skip
def test_unsuitable_arguments_are_refused(name, shape, options, words):
    with pytest.raises(ValueError, match=words):
        built(name, shape, **options)
