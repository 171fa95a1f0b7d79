"""Flows: densities over data from invertible chains, trained in the memory you choose."""

from __future__ import annotations

from recoup.flows.flow import Flow
from recoup.flows.glow import Glow
from recoup.flows.networks import ConvNetwork

__all__ = ["ConvNetwork", "Flow", "Glow"]
