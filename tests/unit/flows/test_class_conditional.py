"""Every builder that takes classes: labels reach every coupling."""

from __future__ import annotations

import pytest
import torch

from recoup.flows import NICE, FlowPlusPlus, Glow, RealNVP
from recoup.invertible import Chain
from tests.unit.flows.models import classes, digits, filled

BUILDERS = {
    "Glow": lambda **o: Glow((1, 4, 4), levels=17, num_levels=1, num_steps=2, width=4, **o),
    "additive Glow": lambda **o: Glow(
        (1, 4, 4), levels=17, num_levels=1, num_steps=2, width=4, coupling="additive", **o
    ),
    "NICE": lambda **o: NICE((1, 4, 4), levels=17, width=4, **o),
    "RealNVP": lambda **o: RealNVP((1, 4, 4), levels=17, num_steps=1, width=4, **o),
    "FlowPlusPlus": lambda **o: FlowPlusPlus(
        (1, 4, 4), levels=17, num_steps=1, width=4, num_components=2, **o
    ),
}


@pytest.fixture(params=BUILDERS)
def build(request):
    torch.manual_seed(0)
    return BUILDERS[request.param]


def test_every_coupling_sees_the_label(build):
    flow = filled(build(num_classes=3))
    assert isinstance(flow.chain, Chain)
    couplings = [stage for stage in flow.chain if stage.takes_context]
    assert len(couplings) == sum(hasattr(stage, "network") for stage in flow.chain)
    # A label that is not seen by one network would leave its column of weights without gradient.
    flow.bits_per_dim(digits(3, (1, 4, 4)), classes(3, 3)).sum().backward()
    for stage in couplings:
        of_labels = stage.network[0].weight.grad[:, -3:].transpose(0, 1).flatten(1)
        assert (of_labels != 0).any(1).all()


def test_without_classes_nothing_takes_a_context(build):
    flow = build()
    assert flow.num_classes is None
    assert not flow.chain.takes_context
    with pytest.raises(ValueError, match="not conditional"):
        flow.bits_per_dim(digits(2, (1, 4, 4)).float(), classes(2, 3))
