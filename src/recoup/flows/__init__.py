"""Flows: densities over data from invertible chains, trained in the memory you choose."""

from __future__ import annotations

from recoup.flows.coupling_flows import NICE, FlowPlusPlus, Glow, RealNVP
from recoup.flows.fitting import Fitted, fit
from recoup.flows.flow import Flow
from recoup.flows.foreign import chains_of
from recoup.flows.iresnet import IResNet
from recoup.flows.latents import Logistic
from recoup.flows.networks import ConvNetwork, DenseNetwork

__all__ = [
    "NICE",
    "ConvNetwork",
    "DenseNetwork",
    "Fitted",
    "Flow",
    "FlowPlusPlus",
    "Glow",
    "IResNet",
    "Logistic",
    "RealNVP",
    "chains_of",
    "fit",
]
