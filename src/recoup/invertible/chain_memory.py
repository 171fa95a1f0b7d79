"""The memory mode of modules that contain a chain."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from recoup._core.drift_guard import Drift, DriftGuard
from recoup.invertible.chain import Chain
from recoup.schedules import Schedule
from recoup.schedules.memory import Memory

__all__ = ["HasChain"]


class HasChain(nn.Module):
    """A module whose `memory` and `drift` are those of its `chain`; parts with chains follow.

    Attributes:
        chain: The chain of the module itself.
    """

    chain: Chain

    @property
    def memory(self) -> Memory:
        """The memory mode of the chain; may be set at any time.

        Setting it also sets that of the parts with chains of their own, except for a `Schedule`,
        which is made for one chain.
        """
        return self.chain.memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self.chain.memory = memory
        if not isinstance(memory, Schedule):
            for part in self._parts_with_chains():
                part.memory = memory

    @property
    def drift(self) -> DriftGuard:
        """The `DriftGuard` of the chain, for constant memory; a string may be assigned."""
        return self.chain.drift

    @drift.setter
    def drift(self, drift: Drift) -> None:
        self.chain.drift = drift
        for part in self._parts_with_chains():
            part.drift = self.chain.drift.anew()

    def _parts_with_chains(self) -> Sequence[HasChain]:
        """Return the parts whose memory mode follows that of this module."""
        return ()
