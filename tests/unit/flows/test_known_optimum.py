"""Where the best possible likelihood is known, a flow that can reach it does."""

from __future__ import annotations

import math

import pytest
import torch

from recoup.flows import Flow
from recoup.invertible import ActNorm, Chain, InvertibleConv1x1, InvertibleConv1x1LU

DIMS = 4


def correlated(n=500):
    generator = torch.Generator().manual_seed(5)
    mixing = torch.randn(DIMS, DIMS, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, DIMS, generator=generator, dtype=torch.float64)
    return noise @ mixing.T + torch.tensor([3.0, -1.0, 0.0, 10.0])


def least_nats(x):
    """The least mean code length of a Gaussian: the entropy of the one with x's own moments."""
    deviations = x - x.mean(0)
    covariance = deviations.T @ deviations / len(x)
    return 0.5 * (DIMS * math.log(2 * math.pi * math.e) + torch.logdet(covariance).item())


@pytest.mark.parametrize("kind", [InvertibleConv1x1, InvertibleConv1x1LU])
@pytest.mark.parametrize("memory", ["linear", "constant"])
def test_a_linear_flow_reaches_the_entropy_of_gaussian_data(kind, memory):
    torch.manual_seed(0)
    chain = Chain(ActNorm(DIMS), kind(DIMS), ActNorm(DIMS), memory=memory)
    flow = Flow(chain, shape=(DIMS,)).double()
    x = correlated()
    best = least_nats(x)
    optimizer = torch.optim.LBFGS(
        flow.parameters(), max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )
    history = []

    def closure():
        optimizer.zero_grad()
        loss = -flow.log_prob(x).mean()
        loss.backward()
        history.append(loss.item())
        return loss

    optimizer.step(closure)
    assert history[0] > best + 0.1  # there was something to learn
    assert min(history) > best - 1e-9  # no density is better than the best
    assert min(history) == pytest.approx(best, abs=1e-6)
