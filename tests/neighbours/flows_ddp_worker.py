"""One of two processes that train flows under DistributedDataParallel in constant memory."""

from __future__ import annotations

import copy

import torch
from torch.nn.parallel import DistributedDataParallel

from recoup.flows import NICE, Glow, RealNVP
from recoup.invertible import ActNorm
from tests.neighbours.workers import report

CASES = ("nice", "realnvp", "glow", "conditional")


def build(case):
    """Without levels: the noise of each rank would be its own."""
    torch.manual_seed(0)
    options = {"levels": None, "width": 8, "memory": "constant"}
    if case == "nice":
        flow = NICE((1, 4, 4), exact=True, **options)
    elif case == "glow":
        flow = Glow((1, 4, 4), num_levels=2, num_steps=2, **options)
    else:
        classes = 3 if case == "conditional" else None
        flow = RealNVP((1, 4, 4), num_steps=2, num_classes=classes, **options)
    for parameter in flow.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for module in flow.modules():
        if isinstance(module, ActNorm):
            module.started = True
    flow.chain.drift = "raise"  # so that nothing mends a wrong inverse
    return flow.double()


def largest_difference(rank, case, *, find_unused):
    flow = build(case)
    plain = copy.deepcopy(flow)
    plain.memory = "linear"
    wrapped = DistributedDataParallel(flow, find_unused_parameters=find_unused)
    mine = slice(4 * rank, 4 * rank + 4)
    worst = 0.0
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(8, 1, 4, 4).double()
        labels = (torch.arange(8) % 3,) if case == "conditional" else ()
        plain.zero_grad()
        flow.zero_grad()
        loss_of(plain, plain, x, labels).backward()
        loss_of(wrapped, flow, x[mine], tuple(label[mine] for label in labels)).backward()
        parameters = dict(flow.named_parameters())
        for name, want in plain.named_parameters():
            difference = (parameters[name].grad - want.grad).abs().max()
            worst = max(worst, float(difference / want.grad.abs().max().clamp(min=1e-3)))
    return worst


def loss_of(model, flow, x, labels):
    """The mean cost: through `model`, which is `flow` or what wraps it and calls its forward."""
    latents, log_det = model(x, *labels)
    parts = (latents,) if isinstance(latents, torch.Tensor) else latents
    log_prob = sum((flow.base.log_prob(z) for z in parts), log_det)
    return -log_prob.mean()


def after_a_first_step(rank):
    """The parameters of a flow whose ActNorms start under DDP, each rank from data of its own."""
    torch.manual_seed(0)
    flow = RealNVP((2,), levels=None, num_steps=2, width=8, memory="constant").double()
    wrapped = DistributedDataParallel(flow)
    optimizer = torch.optim.SGD(flow.parameters(), lr=0.1)
    torch.manual_seed(10 + rank)
    loss_of(wrapped, flow, torch.randn(8, 2).double() + rank, ()).backward()
    optimizer.step()
    return [value for p in flow.parameters() for value in p.flatten().tolist()]


def cases(rank):
    found = {}
    for case in CASES:
        for find_unused in (False, True):
            found[f"{case} {find_unused}"] = largest_difference(rank, case, find_unused=find_unused)
    found["first step"] = after_a_first_step(rank)
    return found


if __name__ == "__main__":
    report(cases)
