"""The bytes in memory over a training step, event by event, and what ran at each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from recoup._core.devices import NO_PEAKS, Peaks
from recoup.memory.size import format_bytes

__all__ = ["PHASES", "Peak", "Phase", "StepLine", "Stretch"]

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")


class Stretch(NamedTuple):
    """A part of a step in which one piece of code ran, with the bytes in memory.

    Args:
        phase: "forward", which the loss is part of, or "backward".
        what: what ran: "forward", "loss", "backward", "backward of the loss", "runs again" (a
            forward, in backward) or "inverse".
        module: the qualified name of the module that ran; in backward, of the one that had made the
            part of the graph. "-" outside any module.
        way: how backward gets what the module needs: the way that a plan chose for its block, or
            "keep", "recompute", "regenerate", "invert" or "offload". "" outside any module.
        levels: the bytes in memory after each event of the allocator, beyond those before the step.
    """

    phase: Phase
    what: str
    module: str
    way: str
    levels: Sequence[int]


class Peak(NamedTuple):
    """The most bytes in memory at one time, and where that was.

    Args:
        num_bytes: the bytes.
        stretch: what ran when they were reached first.
    """

    num_bytes: int
    stretch: Stretch

    def __str__(self) -> str:
        stretch = self.stretch
        where = "" if stretch.module == "-" else f" in {stretch.module}"
        return f"{format_bytes(self.num_bytes)}{where} ({stretch.what})"


@dataclass(frozen=True, slots=True)
class StepLine:
    """The bytes in memory over one training step, as `recoup.timeline` records them.

    Args:
        name: what the step follows, such as "planned".
        stretches: the parts of the step, in order.
        baseline_bytes: the bytes before the step, where they count.
        peaks: its peak as it was requested, allocated and reserved, without those.
    """

    name: str
    stretches: tuple[Stretch, ...]
    baseline_bytes: int = 0
    peaks: Peaks = NO_PEAKS

    def __repr__(self) -> str:
        num_events = sum(len(stretch.levels) for stretch in self.stretches)
        peak = format_bytes(self.peak_bytes)
        return f"StepLine({self.name!r}, {num_events} events, peak {peak})"

    @property
    def peak_bytes(self) -> int:
        """The most bytes in memory at one time."""
        return max((peak.num_bytes for peak in map(self.peak, PHASES) if peak), default=0)

    def peak(self, phase: Phase) -> Peak | None:
        """Return the peak of a phase; None if nothing was allocated or freed in it.

        Args:
            phase: "forward" or "backward".
        """
        found = (
            Peak(self.baseline_bytes + max(stretch.levels), stretch)
            for stretch in self.stretches
            if stretch.phase == phase and stretch.levels
        )
        return max(found, key=lambda peak: peak.num_bytes, default=None)

    def levels(self, phase: Phase) -> list[int]:
        """Return the bytes in memory after each event of a phase.

        Args:
            phase: "forward" or "backward".
        """
        return [
            self.baseline_bytes + level
            for stretch in self._within(phase)
            for level in stretch.levels
        ]

    def starts(self, phase: Phase) -> list[tuple[int, Stretch]]:
        """Return the stretches of a phase, each with the index of its first event.

        Args:
            phase: "forward" or "backward".
        """
        found: list[tuple[int, Stretch]] = []
        num_events = 0
        for stretch in self._within(phase):
            found.append((num_events, stretch))
            num_events += len(stretch.levels)
        return found

    def _within(self, phase: Phase) -> Iterator[Stretch]:
        return (stretch for stretch in self.stretches if stretch.phase == phase)
