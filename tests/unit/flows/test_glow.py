from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from recoup.flows import Glow
from recoup.invertible import AdditiveCoupling, InvertibleConv1x1LU, Normalize


def digits(n=6, levels=17, shape=(1, 8, 8), seed=0):
    return torch.randint(levels, (n, *shape), generator=torch.Generator().manual_seed(seed)).float()


def glow(**options):
    torch.manual_seed(0)
    options = {"levels": 17, "num_steps": 2, "width": 6} | options
    return Glow((1, 8, 8), **options)


def test_first_batch_comes_out_of_every_actnorm_normalised():
    flow = glow(num_levels=1)
    latents, _ = flow(digits(200))
    # the last coupling is the identity and the mixing a rotation: unit variance is left
    assert latents.var().item() == pytest.approx(1.0, abs=0.02)


def test_the_trajectory_of_50_adam_steps_is_the_same_in_every_mode():
    histories = {}
    for memory in ("linear", "constant"):
        flow = glow(num_steps=1, width=4, memory=memory).double()
        optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
        history = []
        for step in range(50):
            x = digits(8, shape=(1, 1, 1), seed=step).double().expand(-1, 1, 8, 8)
            loss = flow.bits_per_dim(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        histories[memory] = torch.tensor(history, dtype=torch.float64)
        assert {float(state["step"]) for state in optimizer.state.values()} == {50.0}
    assert histories["linear"].isfinite().all()
    assert histories["linear"][-1] < histories["linear"][0] - 0.5
    torch.testing.assert_close(histories["constant"], histories["linear"], rtol=0, atol=1e-8)


def test_options_choose_the_layers():
    flow = glow(coupling="additive", conv1x1="lu", alpha=None, dropout=0.2)
    kinds = [type(stage) for stage in flow.chain]
    assert kinds.count(AdditiveCoupling) == kinds.count(InvertibleConv1x1LU) == 4
    assert kinds[0] is Normalize
    # The mixing takes the place of turns: every coupling changes the second half.
    couplings = [stage for stage in flow.chain if isinstance(stage, AdditiveCoupling)]
    assert {stage.condition for stage in couplings} == {"first"}
    assert sum(isinstance(m, nn.Dropout) for m in flow.modules()) == 4


def test_continuous_data_are_taken_as_they_are():
    flow = glow(levels=None).double().eval()
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(flow.reconstruct(x), x)
    # rotations and identities: the density is that of the base
    torch.testing.assert_close(
        flow.log_prob(x), -0.5 * (x.square() + math.log(2 * math.pi)).flatten(1).sum(1)
    )
