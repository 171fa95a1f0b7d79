"""One of two processes that train a flow of another library under DistributedDataParallel."""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import recoup
from tests.neighbours.workers import report
from tests.programs.flows import BATCH, build, given


class Cost(nn.Module):
    """The mean cost of a flow: DDP calls `forward`."""

    def __init__(self, built):
        super().__init__()
        self.flow, self._log_prob = built

    def forward(self, *inputs):
        return -self._log_prob(self.flow, *inputs).mean()


def largest_difference(rank, case):
    plain = Cost(build(case)).eval()
    plain(*given())  # layers start
    wrapped = DistributedDataParallel(recoup.train_in(copy.deepcopy(plain), drift="raise"))
    x, context = (value.detach() for value in given(batch=2 * BATCH))
    mine = slice(BATCH * rank, BATCH * rank + BATCH)
    worst = 0.0
    for _ in range(2):
        plain.zero_grad()
        wrapped.zero_grad()
        plain(x, context).backward()
        wrapped(x[mine], context[mine]).backward()
        for own, want in zip(wrapped.parameters(), plain.parameters(), strict=True):
            if want.grad is not None:
                difference = (own.grad - want.grad).abs().max()
                worst = max(worst, float(difference / want.grad.abs().max().clamp(min=1e-3)))
    return worst


if __name__ == "__main__":
    torch.set_num_threads(1)
    report(lambda rank: {sys.argv[3]: largest_difference(rank, sys.argv[3])})
