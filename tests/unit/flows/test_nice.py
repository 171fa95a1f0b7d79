from __future__ import annotations

import pytest
import torch

from recoup.flows import NICE, Logistic
from recoup.invertible import ActNorm, AdditiveCoupling
from tests.unit.flows.models import (
    filled,
)


def nice(shape=(1, 8, 8), **options):
    torch.manual_seed(0)
    return NICE(shape, **{"levels": 17, "width": 8} | options)


def test_even_and_odd_entries_take_turns():
    flow = filled(nice((6,), levels=None, num_couplings=1))
    x = torch.randn(1, 6, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda v: flow(v)[0], x)[0, :, 0]
    # latents: the even entries alone, and then the odd ones, which see all even ones
    assert ((jacobian[:3] != 0).nonzero()[:, 1] == torch.tensor([0, 2, 4])).all()
    assert (jacobian[3:, [0, 2, 4]] != 0).all()
    assert ((jacobian[3:, [1, 3, 5]] != 0) == torch.eye(3, dtype=torch.bool)).all()


def test_only_the_scaling_at_the_end_changes_volume():
    flow = filled(nice((6,), levels=None))
    x = torch.randn(5, 6, dtype=torch.float64)
    _, log_det = flow(x)
    torch.testing.assert_close(log_det, flow.chain[-1].log_scale.sum().expand(5))


def test_latents_are_logistic_unless_told_otherwise():
    assert isinstance(nice().base.distribution(), Logistic)
    other = torch.distributions.Normal(0.0, 1.0)
    assert isinstance(nice(base=other).base.distribution(), torch.distributions.Normal)


def test_exact_couplings_return_the_very_bits():
    flow = filled(nice(exact=True, num_couplings=12).float(), 0.2).float()
    stages = [stage for stage in flow.chain if not isinstance(stage, ActNorm)]
    assert all(stage.exact for stage in stages if isinstance(stage, AdditiveCoupling))
    x = torch.randint(-8000, 8000, (4, 1, 8, 8)) / 2**14  # on the grid
    couplings = flow.chain[1:-1]
    y, _ = couplings(x)
    assert not torch.equal(y.flatten(), x.flatten())
    assert torch.equal(couplings.inverse(y)[0], x)


@pytest.mark.parametrize("levels", [2, 3, 17, 256])
@pytest.mark.parametrize("exact", [False, True])
def test_no_level_is_rounded_to_the_next(levels, exact):
    flow = nice((8, 8), levels=levels, exact=exact).eval()  # the couplings start as identities
    x = torch.arange(64 * 800).view(-1, 8, 8) % levels
    assert torch.equal(flow.reconstruct(x), x.float())
