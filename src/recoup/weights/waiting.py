"""Draws that wait for a backward, which code outside of the forwards that made them shares.

NOTE [ One draw per step ]

Rule 1. A forward of the module that a reparametrization was applied to has a draw of its own (see
        `forwards`). Its draws wait for a backward as long as the graph of its result lives and no
        backward has reached it.
Rule 2. A read elsewhere, in a part of that module or outside of any forward, belongs to a step: to
        the draws of the forward that waits, if there is one, else to draws that this read begins.
        Later forwards and reads belong to the step, too, until a backward reaches its graph, or a
        clock that the application follows shows another step.
Rule 3. If several forwards with draws of their own wait, it cannot be told which of them a read
        belongs to: that is an error.
Rule 4. A graph holds its draws, by hooks on its nodes, and not the other way round. So a step ends
        with its graph, too.
Rule 5. Each thread has steps of its own, since replicas of a model run side by side.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from recoup._core.pytree import tensors_in
from recoup.errors import RecoupError
from recoup.weights.reparametrization import Application, Drawn, Reparametrization

__all__ = [
    "WaitingDraws",
    "begin_step",
    "forget_forwards",
    "joined_step",
    "step_in_progress",
]

_MOST = 32  # forwards that are noted before those that are over are forgotten


class WaitingDraws:
    """Draws that may wait for a backward: those of a forward, or of a step outside of any.

    Attributes:
        drawn: the draws.
        steps: the numbers of steps at which schedules are evaluated.
        is_over: whether a backward has reached them.
    """

    def __init__(self) -> None:
        self.drawn: dict[Reparametrization, Drawn] = {}
        self.steps: dict[Application, int] = {}
        self.is_over = False
        self.thread = -1  # that waits, once any does

    def __call__(self, gradients: Any) -> None:
        """Note that a backward has reached a node of the graph, unless it makes a graph itself."""
        self.is_over |= not torch.is_grad_enabled()

    @property
    def waits(self) -> bool:
        """Whether no backward has reached them, in the thread that made them (See Rule 5)."""
        return not self.is_over and self.thread == threading.get_ident()

    def waits_for(self, application: Application) -> bool:
        """Whether they wait, and the clock of the application shows the same step (See Rule 2)."""
        if not self.waits:
            return False
        if application.counter is None:
            return True
        return self.steps.get(application) in (None, application.step)

    def wait_for(self, result: Any) -> None:
        """Let the graph of `result` hold these draws (See Rule 4)."""
        self.thread = threading.get_ident()
        if isinstance(result, Tensor):
            if result.grad_fn is not None:
                result.grad_fn.register_prehook(self)
            return
        is_nested = isinstance(result, (tuple, list, dict))
        tensors = tensors_in(result if is_nested else getattr(result, "__dict__", ()))
        for node in {tensor.grad_fn for tensor in tensors}:
            if node is not None:
                node.register_prehook(self)


def forget_forwards(application: Application) -> None:
    """Forget the noted forwards that do not wait; done again once there are twice as many."""
    alive = [ref for ref in application.forwards if (each := ref()) is not None and each.waits]
    application.forwards[:] = alive
    application.num_forwards_to_note = max(_MOST, 2 * len(alive))


def step_in_progress(application: Application) -> WaitingDraws | None:
    """Return the draws of the step in progress; None if no code outside of a forward has any."""
    ref = application.steps_in_progress.get(threading.get_ident())
    found = None if ref is None else ref()
    return found if found is not None and found.waits_for(application) else None


def joined_step(application: Application, name: str | None) -> WaitingDraws | None:
    """Return the draws that a read outside of a forward shares, if any wait (See Rule 2).

    Args:
        application: the call whose draws they are.
        name: the name of the weight in errors; None for a read that may be raw, which gets none.

    Raises:
        RecoupError: when several forwards wait (See Rule 3).
    """
    found = step_in_progress(application)
    if found is not None:
        return found
    forwards = (ref() for ref in application.forwards)
    waiting = [each for each in forwards if each is not None and each.waits_for(application)]
    if len(waiting) > 1:
        if name is None:
            return None
        raise RecoupError(
            f"{name} is used outside of a forward of the module that its noise was applied to, "
            f"while {len(waiting)} forwards with draws of their own wait for a backward, so it "
            "cannot be told which draw it is to have. Put `with recoup.weights.step(model):` "
            "around what one step computes, which then has one draw; or, to use the parameter "
            "itself, read it by `get_parameter`, or within `recoup.weights.disabled`."
        )
    if waiting:
        application.steps_in_progress[threading.get_ident()] = weakref.ref(waiting[0])
    return waiting[0] if waiting else None


def begin_step(application: Application) -> WaitingDraws:
    """Begin a step, whose draws last as long as the caller and the graph hold them."""
    begun = WaitingDraws()
    begun.thread = threading.get_ident()
    application.steps_in_progress[begun.thread] = weakref.ref(begun)
    return begun
