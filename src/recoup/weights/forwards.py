"""The forwards in progress, and the draw that they give to a weight.

NOTE [ One draw per forward ]

Rule 1. A draw lasts for one forward of the module that the reparametrization was applied to: it is
        made at the first read and is the same at every other. If only modules within it are
        running, a forward of one of them belongs to the step in progress (see `waiting`); where no
        graph is built, or in evaluation, its draw lasts for the outermost of these forwards.
Rule 2. `same_draw` around forwards keeps their draws; the innermost one takes precedence.
Rule 3. The innermost `disabled` or `enabled` takes precedence, and over training mode, too.
Rule 4. Frames are in force in one thread, and not in backward; draws of code that runs again
        there are recorded (see `decisions`).
Rule 5. A noisy weight lives as long as the forward of its module. Where a tree runs that module
        again, the weight is made again, and then lives as long as the tree's forward; its gradients
        flow to the node of the first one, so that they are summed before they are scaled, as those
        of a single weight. A recurrent cell is expected to be run again.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.rng import draw_seed
from recoup._core.saved_tensors import is_transformed
from recoup.weights.reparametrization import Application, Drawn, Reparametrization, Reparametrized
from recoup.weights.waiting import (
    WaitingDraws,
    begin_step,
    forget_forwards,
    joined_step,
    step_in_progress,
)

__all__ = [
    "Forward",
    "Frame",
    "Lasting",
    "Outside",
    "Override",
    "SameDraw",
    "builds_graph",
    "frames",
    "is_due",
    "is_in_progress",
    "is_overridden",
    "override_for",
    "resolve",
]


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_stack = _Stack()


def frames() -> list[Frame]:
    """Return the frames in force in this thread, the innermost last."""
    return _stack.frames


def is_in_progress() -> bool:
    """Whether any forward is in progress in this thread."""
    return any(isinstance(frame, Forward) for frame in _stack.frames)


class Frame:
    """A forward or a user's context, in force in a thread from entering to leaving it."""

    @never_compiled
    def __enter__(self) -> None:
        _stack.frames.append(self)

    @never_compiled
    def __exit__(self, *error: object) -> None:
        frames = _stack.frames
        # Contexts of generators may end in another order.
        for index in reversed(range(len(frames))):
            if frames[index] is self:
                del frames[index]
                return


class Forward(WaitingDraws, Frame):
    """A forward of a module that has, or covers, reparametrized weights (See Rule 1).

    Args:
        owner: the module; None for a step that the user marks.
        applications: those that this forward covers.
        roots: those of them that were applied to the module itself; all by default.
    """

    def __init__(
        self,
        owner: nn.Module | None,
        applications: tuple[Application, ...],
        roots: Sequence[Application] | None = None,
    ) -> None:
        super().__init__()
        self.owner = owner
        self.applications = applications
        self.roots = applications if roots is None else roots
        self.joined: dict[Application, WaitingDraws] = {}  # the steps that it belongs to
        self.computed: dict[object, Any] = {}  # by weight, what `ParametrizedWeight` computed
        self.alive: list[Tensor] = []  # weights that live as long as this forward (See Rule 5)
        self.reads_raw = False

    @never_compiled
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        # A graph may hold these draws (see `waiting`), and is to hold nothing else.
        self.computed, self.alive, self.owner = {}, [], None

    def lasting_for(self, step: Reparametrization, *, is_training: bool) -> Lasting:
        """Return what has the first draw of an application in this forward (See Rule 1)."""
        application = step.application
        joined = self.joined.get(application)
        if joined is None and application.steps_in_progress:
            joined = step_in_progress(application)
        is_part = application not in self.roots
        if joined is None and is_part and step.is_random and is_training and builds_graph():
            joined = joined_step(application, f"A weight of {type(self.owner).__name__}")
            joined = joined or begin_step(application)
        if joined is None:
            return self
        self.joined[application] = joined
        return joined

    @never_compiled
    def wait_with(self, result: Any) -> None:
        """Let the draws of this forward, which has ended, wait for a backward of its result."""
        if torch.is_grad_enabled() and not is_transformed():
            for joined in self.joined.values():
                joined.wait_for(result)
            if self.steps:
                self.wait_for(result)
                for application in self.steps:
                    if len(application.forwards) >= application.num_forwards_to_note:
                        forget_forwards(application)
                    application.forwards.append(weakref.ref(self))


class SameDraw(Frame):
    """Draws that last for several forwards (See Rule 2)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_named: dict[str, int] = {}
        self.drawn: dict[Reparametrization, Drawn] = {}
        self.steps: dict[Application, int] = {}

    def seed_for(self, name: str) -> int:
        """Return the next seed for a name: the same in every context with the same seed."""
        again = self._num_named[name] = self._num_named.get(name, -1) + 1
        text = f"{self._seed} {name} {again}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


class Override(Frame):
    """Noise turned on or off for some weights (See Rule 3)."""

    def __init__(self, weights: frozenset[object], is_on: bool) -> None:
        self.weights = weights
        self.is_on = is_on

    @never_compiled
    def __enter__(self) -> None:
        _overriding.append(self)
        super().__enter__()

    @never_compiled
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _overriding.remove(self)


_overriding: list[Override] = []  # of all threads, each as often as it was entered


def is_turned_on() -> bool:
    """Whether any weight may be noisy that would not be otherwise."""
    return any(each.is_on for each in _overriding)


def is_overridden() -> bool:
    """Whether any weight may be noisy or raw that would not be otherwise."""
    return len(_overriding) > 0


def override_for(weight: object) -> bool | None:
    """Return whether the innermost override turns noise of `weight` on or off; None without one."""
    for frame in reversed(_stack.frames):
        if isinstance(frame, Override) and weight in frame.weights:
            return frame.is_on
    return None


def is_due(step: Reparametrization, override: bool | None, *, is_training: bool) -> bool:
    """Whether a forward would reparametrize a weight under an override (See Rule 3)."""
    if override is not None:
        return override or not step.is_random
    return is_training or step.mode == "always"


Lasting = Forward | SameDraw | WaitingDraws  # that have the draws of weights, and step numbers
Outside = Callable[[Reparametrization], WaitingDraws | None]


def builds_graph() -> bool:
    """Whether what is computed here will wait for a backward."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def resolve(
    weight: Reparametrized, *, is_training: bool, outside: Outside | None = None
) -> tuple[Drawn, ...]:
    """Return the draws that the forward in progress gives to `weight`.

    Args:
        weight: the weight.
        is_training: whether the module that has it is in training mode.
        outside: returns the draws of a step outside of all forwards for a reparametrization, or
            None if there the weight is to be raw.
    """
    forwards: list[Forward] = []
    same_draw: SameDraw | None = None
    for frame in reversed(_stack.frames):
        if isinstance(frame, Forward):
            forwards.append(frame)
        elif same_draw is None and isinstance(frame, SameDraw):
            same_draw = frame
    override = override_for(weight) if _overriding else None
    found: list[Drawn] = []
    for step in weight.steps:
        is_usual = override is None and is_training  # then it is due, as `is_due` would find
        if not is_usual and not is_due(step, override, is_training=is_training):
            continue
        outermost: Forward | None = None
        for forward in forwards:
            if step.application in forward.applications:
                outermost = forward
        lasting: Lasting | None
        if outermost is not None:
            lasting = same_draw or outermost
            if lasting is outermost and step.application not in outermost.steps:
                lasting = outermost.lasting_for(step, is_training=is_training)
        else:
            lasting = None if outside is None else outside(step)
            if lasting is not None and same_draw is not None:
                lasting = same_draw
        if lasting is None:
            continue
        drawn = lasting.drawn.get(step)
        if drawn is None:
            drawn = _draw(step, weight.path, lasting, same_draw, is_training)
        for record in step.records:
            record.draws.add((drawn.seed, drawn.magnitude))
        if drawn.magnitude:
            found.append(drawn)
    return tuple(found)


def _draw(
    step: Reparametrization,
    path: str,
    lasting: Lasting,
    same_draw: SameDraw | None,
    is_training: bool,
) -> Drawn:
    if not step.is_random:
        drawn = lasting.drawn[step] = Drawn(step, 0, 1.0)
        return drawn
    application = step.application
    count = lasting.steps.get(application)
    if count is None:  # the first weight of this forward: its step number is that of all others
        if application.counter is None:
            count = application.num_forwards
            application.num_forwards += is_training
        else:
            count = application.step
        lasting.steps[application] = count
    magnitude = step.magnitude(count)
    seed = 0
    if magnitude:
        seed = draw_seed() if same_draw is None else same_draw.seed_for(f"{path} {step.kind}")
    drawn = lasting.drawn[step] = Drawn(step, seed, magnitude)
    return drawn
