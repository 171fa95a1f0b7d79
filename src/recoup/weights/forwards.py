"""The forwards in progress, and the draw that they give to a weight.

NOTE [ One draw per forward ]

Rule 1. A draw lasts for one forward of the module that the reparametrization was applied to: it is
        made at the first read and is the same at every other. If only
        modules within it are running, the draw lasts for the forward of the outermost of them.
Rule 2. `same_draw` around forwards keeps their draws; the innermost one takes precedence.
Rule 3. The innermost `disabled` or `enabled` takes precedence, and over training mode, too.
Rule 4. Frames are in force in one thread, and not in backward; decisions in code that runs again
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
from typing import Any, NamedTuple

from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.restoring import Restoring, Reusable
from recoup._core.rng import draw_seed
from recoup.weights.reparametrization import Application, Drawn, Reparametrization

__all__ = [
    "Forward",
    "Frame",
    "Made",
    "Override",
    "SameDraw",
    "drawn_for",
    "frames",
    "is_due",
    "is_overridden",
    "is_turned_on",
]


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_stack = _Stack()


def frames() -> list[Frame]:
    """Return the frames in force in this thread, the innermost last."""
    return _stack.frames


class Frame:
    """A forward or a user's context, in force from entering to leaving it."""


class _InForce(Restoring):
    """A context in which a frame is in force."""

    __slots__ = ("_frame", "_num_before")

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self._frame = frame
        self._num_before = -1

    def __enter__(self) -> None:
        self._num_before = _stack.frames.count(self._frame)
        _stack.frames.append(self._frame)

    def restore(self) -> None:
        if self._num_before >= 0:
            _remove(_stack.frames, self._frame, self._num_before)
            self._num_before = -1


def _remove(frames: list[Any], frame: object, num_left: int) -> None:
    # From the end: contexts of generators may end in another order.
    places = [place for place, each in enumerate(frames) if each is frame]
    for place in reversed(places[num_left:]):
        del frames[place]


class Made(NamedTuple):
    """A noisy weight of a forward, and the values that it was made from."""

    weight: weakref.ref[Tensor]
    held: Tensor | None
    stub: Tensor | None
    raw: Tensor
    version: int
    drawn: tuple[Drawn, ...]
    with_graph: bool


class Forward(Frame, Restoring):
    """A forward of a module that has, or covers, reparametrized weights (See Rule 1)."""

    __slots__ = ("applications", "drawn", "held", "made", "owner", "reads_raw", "steps")

    def __init__(self, owner: nn.Module | None, applications: tuple[Application, ...]) -> None:
        super().__init__()
        self.owner = owner
        self.applications = applications
        self.drawn: dict[Reparametrization, Drawn] = {}
        self.steps: dict[Application, int] = {}
        self.made: dict[object, Made] = {}
        self.held: list[Tensor] = []
        self.reads_raw = False

    @never_compiled
    def __enter__(self) -> None:
        _stack.frames.append(self)

    @never_compiled
    def restore(self) -> None:
        frames = _stack.frames
        if frames and frames[-1] is self:
            frames.pop()
        else:
            _remove(frames, self, 0)


class SameDraw(Frame, Reusable):
    """Draws that last for several forwards (See Rule 2)."""

    __slots__ = ("_num_named", "_seed", "drawn", "steps")

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._num_named: dict[str, int] = {}
        self.drawn: dict[Reparametrization, Drawn] = {}
        self.steps: dict[Application, int] = {}

    def once(self) -> Restoring:
        """Return a context in which it is in force."""
        return _InForce(self)

    def seed_for(self, name: str) -> int:
        """Return the next seed for a name: the same in every context with the same seed."""
        again = self._num_named[name] = self._num_named.get(name, -1) + 1
        text = f"{self._seed} {name} {again}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


class Override(Frame, Reusable):
    """Noise turned on or off for some weights (See Rule 3)."""

    __slots__ = ("is_on", "places")

    def __init__(self, places: frozenset[object], is_on: bool) -> None:
        super().__init__()
        self.places = places
        self.is_on = is_on

    def once(self) -> Restoring:
        """Return a context in which it is in force."""
        return _Overriding(self)


class _Overriding(_InForce):
    """A context in which noise is turned on or off."""

    __slots__ = ("override",)

    def __init__(self, override: Override) -> None:
        super().__init__(override)
        self.override = override

    def __enter__(self) -> None:
        _overriding.append(self)
        super().__enter__()

    def restore(self) -> None:
        super().restore()
        if self in _overriding:
            _overriding.remove(self)


_overriding: list[_Overriding] = []  # of all threads


def is_turned_on() -> bool:
    """Whether any weight may be noisy that would not be otherwise."""
    return any(each.override.is_on for each in _overriding)


def is_overridden() -> bool:
    """Whether any weight may be noisy or raw that would not be otherwise."""
    return len(_overriding) > 0


def is_due(step: Reparametrization, place: object, *, is_training: bool) -> bool:
    """Whether a forward would reparametrize the weight now (See Rule 3)."""
    for frame in reversed(_stack.frames):
        if isinstance(frame, Override) and place in frame.places:
            return frame.is_on or not step.is_random
    return is_training or step.mode == "always"


def drawn_for(
    step: Reparametrization, place: object, path: str, *, is_training: bool
) -> Drawn | None:
    """Return the seed and magnitude of `step` in the forward in progress, or None."""
    around: Forward | None = None
    kept: SameDraw | None = None
    for frame in reversed(_stack.frames):
        if isinstance(frame, Forward):
            if step.application in frame.applications:
                around = frame
        elif isinstance(frame, SameDraw):
            kept = frame if kept is None else kept
    if around is None or not is_due(step, place, is_training=is_training):
        return None
    lasting = around if kept is None else kept
    drawn = lasting.drawn.get(step)
    if drawn is None:
        magnitude = step.magnitude(_step_of(step.application, lasting.steps, is_training))
        seed = 0
        if magnitude and step.is_random:
            seed = draw_seed() if kept is None else kept.seed_for(f"{path} {step.kind}")
        drawn = lasting.drawn[step] = Drawn(step, seed, magnitude)
    return drawn if drawn.magnitude else None


def _step_of(application: Application, steps: dict[Application, int], is_training: bool) -> int:
    """Return the step number of a forward, which is the same for all its weights."""
    step = steps.get(application)
    if step is None:
        step = steps[application] = application.step
        application.step += is_training
    return step
