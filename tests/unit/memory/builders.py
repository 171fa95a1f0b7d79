"""Builders whose cost is known, measured in processes of their own."""

from __future__ import annotations

import torch
from torch import nn


def held_values(depth, memory):
    print("a builder may print")  # noqa: T201
    num_units = {"linear": depth, "sqrt": round(depth**0.5)}[memory]
    return lambda: [torch.zeros(2**16) for _ in range(num_units)] and None


def chain(depth, memory):
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(depth))
    return nn.Sequential(*layers), (torch.zeros(1024, 64),)


class Pair(nn.LayerNorm):
    def forward(self, x, shift):
        return (x * self.weight + shift, (self.weight.log().sum(), None, "text"))


def pair(depth, memory):
    return Pair(3), (torch.full((2, 3), 2.0), 1.0)


def frozen(depth, memory):
    return nn.Linear(2, 2).requires_grad_(False), torch.zeros(1, 2)


def module_alone(depth, memory):
    return nn.Linear(2, 2)


def raises(depth, memory):
    raise RuntimeError(f"no chain of {depth}\nblocks")


number = 3
