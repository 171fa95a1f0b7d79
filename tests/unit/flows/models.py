"""What the tests of every builder of flows share."""

from __future__ import annotations

import torch
from torch import nn

from recoup.flows import NICE, FlowPlusPlus, Glow, IResNet, RealNVP
from recoup.invertible import ActNorm
from tests.oracle import run_step

BUILDERS = {
    "nice": (NICE, {"width": 8}),
    "realnvp": (RealNVP, {"width": 6, "num_steps": 2}),
    "glow": (Glow, {"width": 6, "num_steps": 2}),
    "flow++": (FlowPlusPlus, {"width": 6, "num_steps": 2, "num_components": 3}),
    "iresnet": (IResNet, {"width": 8, "num_steps": 2}),
}
SMALL = 1, 4, 4


def built(name, shape=(1, 8, 8), **options):
    torch.manual_seed(0)
    build, own = BUILDERS[name]
    return build(shape, **{"levels": 17} | own | options)


def digits(n=6, shape=(1, 8, 8), levels=17):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(levels, (n, *shape), generator=generator).double()


def classes(n, num_classes):
    return torch.arange(n) % num_classes


def started(flow):
    for module in flow.modules():
        if isinstance(module, ActNorm):
            module.started = True
    return flow.double()


def filled(flow, std=0.3):
    for parameter in flow.parameters():
        nn.init.normal_(parameter, std=std)
    return started(flow)


def stirred(flow, by=0.1):
    for parameter in flow.parameters():
        with torch.no_grad():
            parameter += by * torch.randn_like(parameter)
    return started(flow)


def step_of(flow, x, labels=None, memory=None):
    call = lambda flow, x: flow.bits_per_dim(x, labels)  # noqa: E731
    return run_step(flow, x, memory=memory, call=call, loss=torch.mean)
