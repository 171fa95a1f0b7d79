"""A watch on the first step under a plan, which says what the rehearsal could not see.

NOTE [ The first step ]

Rule 1. A plan is rehearsed with the loss that it was given. What a training loop computes outside
        of the model (a loss, label smoothing, another model) shows in a step of that loop alone. So
        the first step is measured, from its first forward to the end of its backward.
Rule 2. The watch ends when torch frees the backward, after everything that belongs to it. It ends
        as well if the forward or the backward fails, if the graph is freed without a backward, and
        with the next forward.
Rule 3. No step is watched within a profiler, a backward, or a rehearsal. On CUDA the statistics of
        the allocator are read, and not reset, since they may be the user's.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any, Protocol

import torch

from recoup._core.allocations import can_follow
from recoup._core.saved_tensors import is_in_backward, when_backward_is_freed
from recoup.memory import format_bytes
from recoup.memory.timeline import timeline
from recoup.planning.rehearsal import is_in_rehearsal

__all__ = ["StepWatch"]


class _Line(Protocol):
    """A context that counts bytes."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc_info: object) -> None: ...

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at one time; available when it has ended."""
        ...


class StepWatch:
    """A watch on a step, from now to the end of its backward.

    Args:
        name: the class of the model.
        device: the device whose bytes are counted.
        budget_bytes: the budget of a step.

    Attributes:
        is_done: whether a step was watched to its end.
    """

    def __init__(self, name: str, device: torch.device, budget_bytes: int) -> None:
        self._name = name
        self._budget_bytes = budget_bytes
        self._thread = threading.get_ident()
        self._line: _Line | None = None
        self.is_done = False
        if not is_in_backward() and not is_in_rehearsal():
            if device.type == "cuda":
                self._line = _CudaPeak(device)
            elif can_follow():
                self._line = timeline(device)
        if self._line is not None:
            self._line.__enter__()

    def backward_begins(self) -> None:
        """End the watch when the backward that this thread runs is freed (See Rule 2)."""
        if not self.is_done:
            self.is_done = True
            when_backward_is_freed(self._say)

    def end(self) -> int:
        """End the watch, and return the peak; 0 if nothing was watched."""
        line = self._line
        if line is None or threading.get_ident() != self._thread:
            return 0
        self._line = None
        line.__exit__(None, None, None)
        return line.peak_bytes

    def _say(self) -> None:
        peak = self.end()
        if peak > self._budget_bytes:
            warnings.warn(
                f"The first step of a {self._name} under its plan took {format_bytes(peak)} of a "
                f"budget of {format_bytes(self._budget_bytes)}. Code between the model and "
                "backward takes memory that was not planned: a loss outside of the model, or "
                "another model. Give that code to recoup.plan as `loss=`.",
                stacklevel=2,
            )


class _CudaPeak:
    """The peak on a CUDA device, if it is higher than any before (See Rule 3); otherwise 0."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes = 0

    def __enter__(self) -> None:
        self._before = torch.cuda.memory_allocated(self._device)
        self._highest = torch.cuda.max_memory_allocated(self._device)

    def __exit__(self, *exc_info: object) -> None:
        highest = torch.cuda.max_memory_allocated(self._device)
        if highest > self._highest:
            self.peak_bytes = highest - self._before
