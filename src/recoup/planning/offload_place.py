"""The place where inputs of blocks may wait for backward, and what moving a byte there costs."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import NamedTuple

import torch

from recoup._core.tiers import existing_folder, tier_for
from recoup.schedules import Offload, Schedule

__all__ = ["NOWHERE", "OffloadPlace", "place_of"]

# Work of moving a byte to host memory and back, in bytes moved on the device: twice the bandwidth
# of its memory over that of the bus. The CPU has no entry: it moves to folders only.
_MOVED = {"cuda": 2 * 60.0}
_TRIAL_BYTES = 1 << 25


class OffloadPlace(NamedTuple):
    """A place for inputs of blocks.

    Args:
        to: "host" or the path of a folder.
        work_per_byte: the work of moving a byte there and back, in bytes moved on the device; None
            if nothing is offloaded. Copies run behind the computation, but the search does not
            count on that: so it never offloads where recomputing is faster.
    """

    to: str = "host"
    work_per_byte: float | None = None

    def of(self, schedule: Schedule) -> Schedule:
        """Return a schedule that offloads to this place."""
        actions = (
            replace(a, to=self.to) if isinstance(a, Offload) else a for a in schedule.actions
        )
        return replace(schedule, actions=tuple(actions))


NOWHERE = OffloadPlace()


def place_of(offload_to: str | os.PathLike[str] | None, device: torch.device) -> OffloadPlace:
    """Return the place that the argument `offload_to` means; a folder's speed is measured.

    Raises:
        ValueError: it is no folder, or host memory for a model that is there already.
        OffloadError: no file can be made in the folder.
    """
    if offload_to is None or offload_to == "host":
        if offload_to == "host" and device.type not in _MOVED:
            raise ValueError(
                f'`offload_to` is "host", but the model is on the {device.type}, whose memory is '
                "host memory. Name a folder on a disk, or leave it out."
            )
        return OffloadPlace("host", _MOVED.get(device.type))
    folder = existing_folder(offload_to)
    if folder is None:
        raise ValueError(
            f"`offload_to` is {offload_to!r}, which is no folder. Make the folder first, on a "
            'disk with room for the inputs of blocks, or give "host".'
        )
    return OffloadPlace(str(folder), _work_per_byte(str(folder), device))


def _work_per_byte(folder: str, device: torch.device) -> float:
    """Return the time of writing and reading a byte over that of moving one on the device."""
    tier = tier_for(folder)
    data = torch.zeros(_TRIAL_BYTES, dtype=torch.uint8, device=device)
    waits = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    data.clone()
    waits()
    start = time.perf_counter()
    data.clone()
    waits()
    moved = (time.perf_counter() - start) / (2 * _TRIAL_BYTES)  # a copy reads and writes
    start = time.perf_counter()
    copy = tier.send(data)
    copy.land()
    copy.fetch().wait()
    waits()
    return (time.perf_counter() - start) / _TRIAL_BYTES / moved
