"""Steps: what one draw belongs to, and the contexts that a user enters.

NOTE [ One draw a step ]

Rule 1. A step begins and ends with the forward of a module that a reparametrization was applied to,
        or with `step(model)`; the outermost one counts. In it a weight is drawn at its first read,
        and every other read has that draw. What is read outside of steps has a draw of its own.
Rule 2. `same_draw` around reads and forwards gives them one draw; the innermost one counts.
Rule 3. The innermost `disabled` or `enabled` takes precedence, and over training mode, too.
Rule 4. A seed is drawn for a step, or for a read outside of steps; that of a weight is a hash of it
        and of the name of the weight. So eager and compiled code have the same draws.
Rule 5. Frames are in force in one thread. Code that runs again has recorded draws (see `weight`).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.rng import draw_seed
from recoup.weights.reparametrization import Application, Drawn, Reparametrization


class _Local(threading.local):
    def __init__(self) -> None:
        self.frames: list[Any] = []  # in force in this thread, the innermost last
        self.raw_of: nn.Module | None = None  # whose weights are read as they are (see `module`)
        self.lists: dict[int, list[Tensor]] = {}  # on which recurrent layers run, by their ids


local = _Local()


class Frame:
    """A step or a user's context, in force in a thread from entering to leaving it."""

    @never_compiled
    def __enter__(self) -> None:
        local.frames.append(self)

    @never_compiled
    def __exit__(self, *error: object) -> None:
        leave(self)


@contextmanager
def running_on(layer: nn.Module, weights: list[Tensor]) -> Generator[None]:
    """Return a context in which a recurrent layer has these weights in its list."""
    before = local.lists.get(id(layer))
    local.lists[id(layer)] = weights
    try:
        yield
    finally:
        del local.lists[id(layer)]
        if before is not None:
            local.lists[id(layer)] = before


def leave(frame: Frame) -> None:
    """Take a frame out of force; contexts of generators may end in another order."""
    frames = local.frames
    for index in reversed(range(len(frames))):
        if frames[index] is frame:
            del frames[index]
            return


class Step(Frame):
    """Draws that several reads share (See Rule 1).

    Args:
        owner: the module whose forward it is; None for a block of the user's.
        applications: those whose draws belong to it.
        seed: of all of them; drawn at the first one if None.
        counts: whether it is a step that schedules count.

    Attributes:
        drawn: what was drawn.
        made: by weight: what it was computed from, a weak reference to it, the tensor through which
            gradients of a second one reach it, and that second one (see `weight`).
        last: the weight that was computed last, which is most often read again at once.
    """

    def __init__(
        self,
        owner: nn.Module | None,
        applications: Sequence[Application],
        seed: int | None = None,
        counts: bool = True,
    ) -> None:
        self.owner = owner
        self.applications = applications
        self.drawn: dict[Reparametrization, Drawn] = {}
        self.made: dict[object, tuple[Any, ...]] = {}
        self.last: Tensor | None = None
        self._seed = seed
        self._counts = counts
        # The numbers of the step, by the calls that applied; how often a name was drawn for.
        self._numbers: dict[Application | str, int] = {}

    def draw(self, step: Reparametrization, path: str, *, is_training: bool) -> Drawn:
        """Draw for the weight that is called `path`."""
        application = step.application
        number = self._numbers.get(application)
        if number is None:  # it is the same for all weights
            number = self._numbers[application] = application.step
            application.step += self._counts and is_training and application.counts
        rate, seed = step.rate, 0
        magnitude = rate if isinstance(rate, float) else step.magnitude(number)
        if magnitude:
            if self._seed is None:
                self._seed = draw_seed()
            name = f"{path} {step.kind}"
            again = self._numbers[name] = self._numbers.get(name, -1) + 1
            text = f"{self._seed} {name} {again}".encode()
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
        drawn = self.drawn[step] = Drawn(step, seed, magnitude)
        return drawn


class SameDraw(Step):
    """Draws that last for several steps (See Rule 2)."""


class Override(Frame):
    """Noise turned on or off for some weights (See Rule 3)."""

    def __init__(self, weights: Iterable[Any], *, is_on: bool) -> None:
        self.weights = frozenset(weights)
        self.is_on = is_on

    @never_compiled
    def __enter__(self) -> None:
        for weight in self.weights:
            weight.is_switched = weight.is_switched or self.is_on
        super().__enter__()
