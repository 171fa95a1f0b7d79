"""The networks of couplings: they start at zero, and take a context where they are told to."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from recoup.flows import ConvNetwork, DenseNetwork

NETWORKS = {
    "conv": lambda **options: (ConvNetwork(3, 5, width=7, **options), torch.randn(2, 3, 4, 6)),
    "dense": lambda **options: (DenseNetwork(3, 5, width=7, **options), torch.randn(2, 3)),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def live(name, **options):
    """With a last layer that says something."""
    network, x = NETWORKS[name](**options)
    nn.init.normal_(network[-1].weight)
    return network, x


@every_network
@pytest.mark.parametrize(("depth", "num_context"), [(1, 0), (4, 3)])
def test_networks_start_at_zero(name, depth, num_context):
    network, x = NETWORKS[name](depth=depth, num_context=num_context)
    assert network.takes_context is (num_context > 0)
    context = (torch.randn(2, 3),) if num_context else ()
    zeros = torch.zeros(2, 5, *x.shape[2:])
    assert torch.equal(network(x, *context), zeros)
    nn.init.normal_(network[-1].weight)
    assert not torch.equal(network(x, *context), zeros)
    for twin in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(twin(x, *context), network(x, *context))
    assert [*network.state_dict()][:3] == ["0.weight", "0.bias", "2.weight"]  # as in old files


def test_depth_adds_blocks_around_which_the_input_goes():
    network = ConvNetwork(1, 1, width=2, depth=3)
    assert len(network) == len(ConvNetwork(1, 1, width=2)) + 4
    block = network[4]
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(1, 2, 4, 4)
    assert torch.equal(block(x), x)
    nn.init.ones_(block[-1].bias)
    assert torch.equal(block(x), x + 1)


@every_network
def test_context_is_seen_and_gets_its_gradient(name):
    network, x = live(name, num_context=3)
    context = torch.randn(2, 3, requires_grad=True)
    output = network(x, context)
    assert not torch.allclose(output, network(x, context + 1))
    output.sum().backward()
    assert (context.grad != 0).any()
    whole = torch.eye(3, dtype=torch.int64)[:2]  # is taken into the type of the input
    assert torch.equal(network(x, whole), network(x, whole.float()))
    without, x = live(name)
    assert torch.equal(without(x, torch.randn(2, 9)), without(x))


def test_a_context_of_rows_is_the_same_at_every_position_and_dropout_drops_in_training_alone():
    network, x = live("conv", num_context=3, dropout=0.5)
    rows = torch.randn(2, 3)
    assert not torch.equal(network(x, rows), network(x, rows))
    network.eval()
    image = rows.view(2, 3, 1, 1).expand(2, 3, 4, 6).contiguous()
    assert torch.equal(network(x, rows), network(x, image))
    image[0, 0, 0, 0] += 1
    assert not torch.equal(network(x, rows), network(x, image))


@pytest.mark.parametrize(
    ("name", "context", "words"),
    [
        ("conv", None, r"`context` is None, but this network needs \(2, 3\)"),
        ("conv", (2, 3, 4, 4), r"of shape \(2, 3, 4, 4\)"),
        ("dense", (1, 3), r"of shape \(1, 3\)"),
    ],
)
def test_unsuitable_contexts_are_refused(name, context, words):
    network, x = NETWORKS[name](num_context=3)
    with pytest.raises(ValueError, match=words):
        network(x, None if context is None else torch.zeros(context))


@pytest.mark.parametrize(("name", "value"), [("width", 0), ("depth", 0), ("num_context", -1)])
def test_unsuitable_arguments_are_refused(name, value):
    for kind in (ConvNetwork, DenseNetwork):
        with pytest.raises(ValueError, match=f"`{name}` is {value}"):
            kind(2, 2, **{"width": 4, name: value})
