"""What every builder of flows promises, whatever it builds, its layers, and their networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from recoup import invertible as inv
from recoup.flows import ConvNetwork, DenseNetwork, Logistic
from recoup.invertible.contract import as_tuple
from tests.oracle import assert_same_step
from tests.unit.flows.models import SMALL, built, classes, digits, filled, step_of, stirred


@pytest.mark.filterwarnings("ignore:Under memory=.constant.:UserWarning")
@pytest.mark.parametrize(("name", "options", "is_first"), [  # with the start of ActNorms
    ("nice", {"exact": False, "dropout": 0.4, "num_classes": 3}, False),
    ("realnvp", {"dropout": 0.4, "num_classes": 3}, True),
    ("glow", {"dropout": 0.5}, False),
    ("flow++", {"dropout": 0.4, "num_classes": 3, "variational": True}, True),
    ("iresnet", {"log_det": "unbiased", "num_terms": 3}, True),
])  # fmt: skip
def test_gradients_are_those_of_linear_memory_with_dropout_too(name, options, is_first):
    flow = stirred(built(name, SMALL, **options))
    for module in flow.modules() if is_first else ():
        if isinstance(module, inv.ActNorm):
            module.started = False
    num_networks = sum(hasattr(stage, "network") and "dropout" in options for stage in flow.chain)
    assert sum(isinstance(m, nn.Dropout) for m in flow.modules()) >= num_networks
    given = digits(shape=SMALL), classes(6, 3) if "num_classes" in options else None
    want = step_of(flow, *given)
    assert all(gradient is not None for gradient in want.gradients.values())
    assert max(gradient.abs().max() for gradient in want.gradients.values()) > 1e-3
    for memory in ("constant", "sqrt", "log"):
        assert_same_step(step_of(flow, *given, memory), want, rtol=1e-8)


@pytest.mark.parametrize(("name", "options", "latents"), [
    ("nice", {"exact": True, "num_classes": 4}, [(64,)]),
    ("realnvp", {}, [(2, 4, 4), (2, 4, 4)]),
    ("glow", {}, [(2, 4, 4), (8, 2, 2)]),
    ("flow++", {"variational": True}, [(4, 4, 4)]),
    ("iresnet", {"num_levels": 2}, [(16, 2, 2)]),
])  # fmt: skip
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


NORM, MIX = "ActNorm", "InvertibleConv1x1"
BOARD, BOARD_2 = ("checkerboard", "first"), ("checkerboard", "second")
HALVES, HALVES_2 = ("channels", "first"), ("channels", "second")
SCALE = "Squeeze", *(NORM, "InvertibleResidual") * 2
BOARDS = NORM, BOARD, NORM, BOARD_2, NORM, BOARD
THREE = "Squeeze", NORM, HALVES, NORM, HALVES_2, NORM, HALVES, "Split"
MIXED = "Squeeze", NORM, MIX, HALVES  # takes the place of turns: each changes the second half


@pytest.mark.parametrize(("name", "options", "kinds"), [
    ("realnvp", {"num_steps": 3}, ["Logit", *BOARDS, *THREE, *BOARDS]),
    ("flow++", {"num_steps": 1}, ["Logit", NORM, BOARD, *MIXED, NORM, MIX, BOARD]),
    ("glow", {"alpha": None, "num_steps": 1}, ["Normalize", *MIXED, "Split", *MIXED]),
    ("iresnet", {"num_levels": 2}, ["Logit", *SCALE, *SCALE, NORM]),
])  # fmt: skip
def test_the_order_of_the_layers(name, options, kinds):
    stages = built(name, **options).chain
    found = [(s.split, s.condition) if hasattr(s, "split") else type(s).__name__ for s in stages]
    assert found == kinds


def test_options_choose_the_layers():
    flow = built("glow", coupling="additive", conv1x1="lu")
    kinds = [type(stage) for stage in flow.chain]
    assert kinds.count(inv.AdditiveCoupling) == kinds.count(inv.InvertibleConv1x1LU) == 4
    flow = built("iresnet", num_levels=2, coefficient=0.7, num_terms=5)
    blocks = [stage for stage in flow.chain if isinstance(stage, inv.InvertibleResidual)]
    assert {(block.log_det, block.num_terms) for block in blocks} == {("unbiased", 5)}
    assert all(0.7**6 < block.continuation == 0.5 for block in blocks)
    layers = [layer for layer in flow.modules() if isinstance(layer, inv.LipschitzConv2d)]
    assert [layer.kernel_size[0] for layer in layers[:3]] == [3, 1, 3]
    assert {layer.coefficient for layer in layers} == {0.7}
    plane = built("iresnet", (2,), levels=None, coefficient=0.95).chain[1]
    assert plane.continuation == pytest.approx(0.95**3)
    assert plane.log_det == "exact"
    assert isinstance(built("flow++", variational=True).dequantize, inv.VariationalDequantize)
    assert [s.exact for s in built("nice", exact=True).chain if hasattr(s, "exact")] == [True] * 4
    assert isinstance(built("nice").base.distribution(), Logistic)
    assert isinstance(built("nice", base=Normal(0.0, 1.0)).base.distribution(), Normal)


def test_even_and_odd_entries_of_nice_take_turns_and_its_end_scales():
    flow = filled(built("nice", (6,), levels=None, num_couplings=1, depth=1))
    x = torch.randn(1, 6, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda v: flow(v)[0], x)[0, :, 0]
    # latents: the even entries alone, and then the odd ones, which see all even ones
    assert ((jacobian[:3] != 0).nonzero()[:, 1] == torch.tensor([0, 2, 4])).all()
    assert (jacobian[3:, [0, 2, 4]] != 0).all()
    assert ((jacobian[3:, [1, 3, 5]] != 0) == torch.eye(3, dtype=torch.bool)).all()
    torch.testing.assert_close(flow(x)[1], flow.chain[-1].log_scale.sum()[None])


@pytest.mark.parametrize(("name", "shape", "options", "words"), [
    *((name, SMALL, {option: 0}, f"`{option}` is 0")
      for name, option in (("nice", "num_couplings"), ("realnvp", "num_steps"),
                           ("glow", "num_levels"), ("iresnet", "depth"))),
    ("nice", (1,), {}, r"`shape` is \(1,\)"),
    ("nice", SMALL, {"levels": 131072, "exact": True}, "`levels` is 131072, but with `exact`"),
    ("nice", (4,), {"num_couplings": 20_000}, "`num_couplings` is 20000, but .* most 10,000"),
    ("realnvp", (1,), {}, "at least 2 values"),
    ("realnvp", (8, 8), {}, r"`shape` is \(8, 8\)"),
    ("glow", (1, 8, 8), {"num_levels": 4}, "multiples of 16"),
    ("glow", SMALL, {"coupling": "linear"}, "`coupling` is 'linear'"),
    ("glow", SMALL, {"conv1x1": "qr"}, "`conv1x1` is 'qr'"),
    ("flow++", (5,), {"variational": True}, "`variational` is for images"),
    ("flow++", SMALL, {"variational": "no"}, "`variational` is 'no'"),
    ("iresnet", (2,), {"num_levels": 2}, "`num_levels` 1"),
])  # fmt: skip
def test_unsuitable_arguments_are_refused(name, shape, options, words):
    with pytest.raises(ValueError, match=words):
        built(name, shape, **options)


@pytest.mark.parametrize("kind", [ConvNetwork, DenseNetwork])
def test_networks_refuse_sizes_and_contexts(kind):
    for name, value in (("width", 0), ("depth", 0), ("num_context", -1)):
        with pytest.raises(ValueError, match=f"`{name}` is {value}"):
            kind(2, 2, **{"width": 4, name: value})
    network, x = kind(2, 2, width=4, num_context=3), torch.zeros(2, 2, 4, 6)
    x = x if kind is ConvNetwork else x[..., 0, 0]
    for context in (None, torch.zeros(2, 3, 4, 4), torch.zeros(1, 3)):
        with pytest.raises(ValueError, match="`context` is"):
            network(x, context)


NETWORKS = {
    "conv": lambda **options: (ConvNetwork(3, 5, width=7, **options), torch.randn(2, 3, 4, 6)),
    "dense": lambda **options: (DenseNetwork(3, 5, width=7, **options), torch.randn(2, 3)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("depth", "num_context"), [(1, 0), (4, 3)])
def test_networks_start_at_zero_and_give_their_context_its_gradient(name, depth, num_context):
    network, x = NETWORKS[name](depth=depth, num_context=num_context)
    assert network.takes_context is (num_context > 0)
    context = [torch.randn(2, 3).requires_grad_()] * (num_context > 0)
    zeros = torch.zeros(2, 5, *x.shape[2:])
    assert torch.equal(network(x, *context), zeros)
    nn.init.normal_(network[-1].weight)
    output = network(x, *context)
    assert not torch.equal(output, zeros)
    if num_context:  # whole numbers are taken into the type of the input
        whole = context[0].round().long()
        assert torch.equal(network(x, whole), network(x, whole.float()))
        output.sum().backward()
        assert (context[0].grad != 0).any()
    assert [*network.state_dict()][:3] == ["0.weight", "0.bias", "2.weight"]  # as in old files


def test_a_context_of_rows_is_the_same_at_every_position_and_dropout_drops_in_training_alone():
    network, x = NETWORKS["conv"](num_context=3, dropout=0.5)
    nn.init.normal_(network[-1].weight)
    rows = torch.randn(2, 3)
    assert not torch.equal(network(x, rows), network(x, rows))
    network.eval()
    image = rows.view(2, 3, 1, 1).expand(2, 3, 4, 6).contiguous()
    assert torch.equal(network(x, rows), network(x, image))
    image[0, 0, 0, 0] += 1
    assert not torch.equal(network(x, rows), network(x, image))


@pytest.mark.parametrize("name", ["nice", "realnvp", "glow", "flow++", "glow, additive"])
def test_every_coupling_sees_the_label(name):
    name, *coupling = name.split(", ")
    options = {"coupling": coupling[0]} if coupling else {}
    flow = filled(built(name, SMALL, num_classes=3, **options))
    couplings = [stage for stage in flow.chain if stage.takes_context]
    assert len(couplings) == sum(hasattr(stage, "network") for stage in flow.chain)
    # A label that is not seen by one network would leave its column of weights without gradient.
    flow.bits_per_dim(digits(3, SMALL), classes(3, 3)).sum().backward()
    for stage in couplings:
        of_labels = stage.network[0].weight.grad[:, -3:].transpose(0, 1).flatten(1)
        assert (of_labels != 0).any(1).all()
