"""Forwards whose backward is pending, what one more may take, and a watch on the first step.

NOTE [ Pending forwards ]

Rule 1. A forward is pending from its end until a backward reaches one of its outputs, or until its
        graph is freed. The nodes of its outputs hold a token, and call it before they run. A
        backward that leaves its graph for another one (`retain_graph`, `create_graph`) ends
        nothing.
Rule 2. The forwards of one thread count. A forward within a forward of the model, or within a
        region or a checkpoint around it, does not: the outer one decides what is kept.
Rule 3. A plan is for a number of forwards before one backward. A forward beyond that number, or
        beside those that follow another plan, takes what a step takes beyond the forwards that it
        was planned with, and the gradients of the first backward are there when the second one
        begins. What this predicts is compared with the budget before the forward runs.
Rule 4. A plan made in evaluation mode holds for no training: dropouts keep masks, and norms the
        statistics of a batch. The modes of the model and of its blocks are compared.

NOTE [ The first step ]

Rule 5. A plan is rehearsed with the loss that it was given. What a training loop computes outside
        of the model (a loss, label smoothing, another model) shows in a step of that loop alone. So
        the first step is measured, from its first forward to the end of its backward.
Rule 6. The watch ends when torch frees the backward, after everything that belongs to it; if the
        forward or the backward fails, or the graph is freed without a backward; and with the next
        forward. A backward in another thread says nothing, and cannot end it.
Rule 7. No step is watched within a profiler, a backward, or a rehearsal. On an accelerator the
        statistics of the allocator are read, and not reset, since they may be the user's.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recoup._core.devices import is_accelerator, memory_counts
from recoup._core.saved_tensors import is_graph_retained, is_in_backward, when_backward_is_freed
from recoup._core.storage_tracking import can_follow
from recoup.errors import BudgetError
from recoup.memory import format_bytes
from recoup.memory.meter import Timeline, timeline
from recoup.planning.arguments import tensors_within
from recoup.planning.options import Room, gradient_bytes
from recoup.planning.rehearsal import is_in_rehearsal
from recoup.planning.step import device_of
from recoup.planning.tiled_head import LazyLogits


class _Forward:
    """A forward that has ended; nodes of its graph hold it (See Rule 1).

    Args:
        held_bytes: the bytes that it holds until its backward.
        latest: the index of the last stage of its plan that it called.
        watch: the watch on its step; None for none.
    """

    __slots__ = ("__weakref__", "_watch", "held_bytes", "is_over", "latest")

    def __init__(self, held_bytes: int, latest: int, watch: _StepWatch | None) -> None:
        self.held_bytes = held_bytes
        self.latest = latest
        self.is_over = False
        self._watch = watch

    def __call__(self, gradients: object) -> None:
        """End it: a backward has reached one of its outputs."""
        self.is_over |= not is_graph_retained()
        if self._watch is not None:
            self._watch.backward_begins()


class PendingForwards(threading.local):
    """The forwards of a model whose backward has not come, of each thread (See Rule 2)."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[_Forward]] = []
        self._watch: _StepWatch | None = None

    def watch(self, model: nn.Module, most_bytes: int) -> None:
        """Watch the step that begins, if it is the first one, and warn if it takes more."""
        self.unwatch()
        if self._watch is None or not self._watch.is_done:
            self._watch = _StepWatch(type(model).__name__, device_of(model), most_bytes)

    def unwatch(self) -> None:
        """End the watch on a step that has no backward in this thread."""
        if self._watch is not None and not self._watch.is_ending:
            self._watch.end()

    def alive(self) -> list[_Forward]:
        """Return those that are pending, the first one first."""
        pairs = [(ref, found) for ref in self._refs if (found := ref()) and not found.is_over]
        self._refs = [ref for ref, _ in pairs]
        return [found for _, found in pairs]

    def add(self, output: Any, held_bytes: int, latest: int) -> None:
        """Note that a forward has ended; `held_bytes` and `latest` are those of `_Forward`."""
        made = _Forward(held_bytes, latest, self._watch)
        # Logits that are not computed have a loss that does not pass through them.
        outputs = [each for each in tensors_within(output) if not isinstance(each, LazyLogits)]
        nodes = {id(each.grad_fn): each.grad_fn for each in outputs if each.grad_fn is not None}
        for node in nodes.values():
            node.register_prehook(made)
        if nodes:
            self._refs.append(weakref.ref(made, self._freed))
        elif not self._refs:
            self.unwatch()

    def _freed(self, ref: weakref.ref[_Forward]) -> None:
        if not self.alive():
            self.unwatch()


@dataclass
class StepBound:
    """The bound that a plan sets to each step of a model.

    Args:
        step_bytes: the bytes that a step may take.
        room: the room that the budget leaves for a step.
        peak_bytes: the peak of the step that was rehearsed.
        held: the bytes that each of its forwards holds until its backward.
        gradient_bytes: the bytes of the gradients of the parameters.
        modes: the model and its blocks, and which of them were in training mode.
        pending: the forwards whose backward is pending.
    """

    step_bytes: int
    room: Room
    peak_bytes: int
    held: Sequence[int]
    gradient_bytes: int
    modes: Sequence[tuple[nn.Module, bool]]
    pending: PendingForwards

    def bytes_with(self, pending: Sequence[_Forward]) -> int:
        """Return the bytes that a step with one more forward than these takes (See Rule 3)."""
        own = sum(self.held[: min(len(pending), len(self.held) - 1)])
        first_gradients = self.gradient_bytes if pending and len(self.held) == 1 else 0
        return sum(e.held_bytes for e in pending) - own + self.peak_bytes + first_gradients

    def fits(self, pending: Sequence[_Forward]) -> bool:
        """Whether a step with one more forward than these keeps to the budget."""
        return self.bytes_with(pending) <= self.step_bytes

    def waiting(self) -> list[_Forward]:
        """Return the forwards that are pending; a graph in a reference cycle is not."""
        if not self.fits(self.pending.alive()):  # nobody holds them while garbage is collected
            gc.collect()
        return self.pending.alive()

    def check(self, model: nn.Module) -> list[_Forward]:
        """Return the forwards that are pending before one more, or raise (See Rules 3 and 4)."""
        for module, was_training in self.modes:
            if module.training and not was_training:
                raise ValueError(
                    f"A {type(model).__name__} is trained under a plan that was made while "
                    f"{'it' if module is model else f'a {type(module).__name__} in it'} was in "
                    "evaluation mode, in which it keeps less. Call `model.train()` before "
                    "recoup.plan, or give `replan=True`."
                )
        if self.room.gradient_bytes is not None:
            self._warn_of_gradients(model, gradient_bytes(model) - self.room.gradient_bytes)
        pending = self.waiting()
        found, num = self.bytes_with(pending), len(pending) + 1
        if found <= self.step_bytes:
            return pending
        ordinal = {2: "second", 3: "third"}.get(num, f"{num}th")
        held = sum(each.held_bytes for each in pending)
        raise BudgetError(
            f"A {type(model).__name__} was called for the {ordinal} time before a backward, and "
            f"its plan is for {len(self.held)}: the calls before hold up to {format_bytes(held)}, "
            f"and with this one the step takes up to {format_bytes(found)} ({found} bytes) of the "
            f"{format_bytes(self.step_bytes)} that its budget leaves to a step. Plan with "
            f"`num_forwards={num}`, call it in torch.no_grad() where no gradient is needed, or let "
            "go of outputs that are not needed.",
            self.room.budget_for(found),
        )

    def _warn_of_gradients(self, model: nn.Module, more_bytes: int) -> None:
        """Warn once if gradients are there before a step that were not when it was planned."""
        found = self.peak_bytes + more_bytes
        if more_bytes <= 0 or found <= self.step_bytes:
            return
        self.room = self.room._replace(gradient_bytes=None)  # it has been said
        warnings.warn(
            f"A {type(model).__name__} has gradients of {format_bytes(more_bytes)} before its step "
            "(of the backwards that are accumulated, or set to zeros), which count in a budget of "
            f"the total. With them it may take {format_bytes(found)} of the "
            f"{format_bytes(self.step_bytes)} that the budget leaves to a step. Plan while they "
            "are there (after a first backward), or give as many bytes less.",
            stacklevel=2,
        )


class _StepWatch:
    """A watch on a step, from now to the end of its backward.

    `is_done` says that the step has come to its backward, so that no other one is watched, and
    `is_ending` that this backward, once it is freed, ends the watch.
    """

    def __init__(self, name: str, device: torch.device, most_bytes: int) -> None:
        self._name = name
        self._most_bytes = most_bytes
        self._thread = threading.get_ident()
        self._line: Timeline | _DevicePeak | None = None
        self.is_done = self.is_ending = False
        if not is_in_backward() and not is_in_rehearsal():
            if is_accelerator(device):
                self._line = _DevicePeak(device)
            elif can_follow():
                self._line = timeline(device)
        if self._line is not None:
            self._line.__enter__()

    def backward_begins(self) -> None:
        """End the watch when the backward that this thread runs is freed (See Rule 6)."""
        if not self.is_done:
            self.is_done = True
            self.is_ending = threading.get_ident() == self._thread
            if self.is_ending:
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
        line, peak = self._line, self.end()
        if isinstance(line, _DevicePeak) and line.num_retries:
            warnings.warn(
                f"The first step of a {self._name} under its plan found room only when the "
                f"allocator had given cached memory back ({line.num_retries} times), which takes "
                "long: free memory is in pieces that are too small. Let recoup.plan leave more "
                "`headroom`, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch "
                "starts.",
                stacklevel=2,
            )
        if peak > self._most_bytes:
            warnings.warn(
                f"The first step of a {self._name} under its plan took {format_bytes(peak)} of the "
                f"{format_bytes(self._most_bytes)} that its budget leaves to a step. Code "
                "between the model and backward takes memory that was not planned: a loss outside "
                "of the model, or another model. Give that code to recoup.plan as `loss=`. Leave "
                "autocast before backward, or it holds what it has cast. Where "
                "several forwards have a backward each, run that of the last one first.",
                stacklevel=2,
            )


class _DevicePeak:
    """The peak on an accelerator, if it is higher than any before (See Rule 7); otherwise 0."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak_bytes = self.num_retries = 0

    def __enter__(self) -> None:
        self._before = memory_counts(self._device)

    def __exit__(self, *exc_info: object) -> None:
        before, now = self._before, memory_counts(self._device)
        self.num_retries = now.num_retries - before.num_retries
        if now.peaks.allocated > before.peaks.allocated:
            self.peak_bytes = now.peaks.allocated - before.allocated
