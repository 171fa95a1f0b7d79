"""Gradients that are taken while forward runs.

NOTE [ Residuals that are used before the call ends ]

Rule 1. A call that takes gradients (the log-determinant of a network) needs its own residuals
        before it has ended, and so before the region around it can make them again: some second
        runs keep nothing at all. So the tensors that such a call saves are held here until the call
        ends, whatever the pair beneath does with them.
Rule 2. After the call nothing is held here: backward gets the tensors from the pair beneath, which
        packed each tensor once, in the order of the saves.

NOTE [ A region that takes gradients ]

Rule 1. Code in a region may take a gradient itself (a force, a penalty). It then unpacks residuals
        of a run before that run has ended. A taped second run has them, since it keeps all.
Rule 2. Only a run shows whether code does that. So the first run of some code keeps its residuals
        until it ends. If none was unpacked, later first runs keep nothing; otherwise they keep
        theirs, too. A second run needs as much memory, so the peak of a step does not grow. The
        same holds for a second run that is not taped.
Rule 3. Code that takes its first gradient in a later run is an error, once; after that it is known
        to take gradients.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from recoup._core.compile import never_compiled
from recoup._core.restoring import Restoring
from recoup._core.saved_tensors import Pair, pair_in_force, saving
from recoup.errors import ReplayError

__all__ = ["FirstRun", "GradientsWithin", "place_of"]

_Parts = weakref.WeakSet[Any]
_seen: tuple[_Parts, _Parts] = (_Parts(), _Parts())  # by mode, as in `random_sources`
_asking: tuple[_Parts, _Parts] = (_Parts(), _Parts())


class FirstRun:
    """The decision whether a run keeps residuals: NOTE [ A region that takes gradients ].

    Args:
        parts: the code and modules that run; held weakly.
        is_training: the mode they run in.
    """

    __slots__ = ("_is_asked", "_mode", "_parts", "keeps")

    def __init__(self, parts: Iterable[Any], *, is_training: bool) -> None:
        self._parts = tuple(parts)
        self._mode = int(is_training)
        self._is_asked = False
        is_seen = all(part in _seen[self._mode] for part in self._parts)
        self.keeps = not is_seen or all(part in _asking[self._mode] for part in self._parts)

    def asked(self, name: str) -> None:
        """Note that a residual of the run is unpacked; raise if it is not kept (See Rule 3)."""
        self._is_asked = True
        if not self.keeps:
            raise ReplayError(
                f"{name} takes a gradient inside, which it did not when it ran first, so that its "
                "residuals are not at hand. They will be in its next runs: repeat this step. Or "
                "put what takes the gradient into a recoup.checkpoint of its own, or outside."
            )

    def end(self, *, is_whole: bool) -> None:
        """Record whether the code takes gradients; not `is_whole` if an exception ended the run."""
        if self._is_asked:
            _asking[self._mode].update(self._parts)
        if self._is_asked or is_whole:
            _seen[self._mode].update(self._parts)


class _Place:
    """A weakly referable object that stands for a place in code."""


@functools.cache
def place_of(name: str) -> object:
    """Return the object that stands for a place in code, by its file and line."""
    del name
    return _Place()


class GradientsWithin(Restoring):
    """A context in which `torch.autograd.grad` can use tensors saved within, in any region."""

    __slots__ = ("_at_hand", "_beneath", "_hooks")

    def __init__(self) -> None:
        super().__init__()
        self._beneath: Pair | None = None
        self._hooks: saving | None = None
        self._at_hand: list[_AtHand] = []

    def __enter__(self) -> None:
        self._beneath = pair_in_force()
        if self._beneath is not None:  # without one, autograd has everything itself
            self._hooks = saving(self._pack, _unpack)
            self._hooks.__enter__()

    def restore(self) -> None:
        if self._hooks is not None:
            self._hooks.restore()
            self._hooks = None  # it holds a method of ours: a reference cycle
        for held in self._at_hand:
            held.tensor = None  # See Rule 2
        self._at_hand.clear()

    @never_compiled
    def _pack(self, tensor: Tensor) -> _AtHand:
        held = _AtHand(tensor, self._beneath)
        self._at_hand.append(held)
        return held


class _AtHand:
    """A saved tensor: held until the context ends, then unpacked by the pair beneath."""

    __slots__ = ("packed", "tensor", "unpack")

    def __init__(self, tensor: Tensor, beneath: Pair | None) -> None:
        pack, self.unpack = beneath or (_itself, _itself)
        self.packed: Any = pack(tensor)
        self.tensor: Tensor | None = tensor.detach()


@never_compiled
def _unpack(held: _AtHand) -> Tensor:
    return held.unpack(held.packed) if held.tensor is None else held.tensor


def _itself(tensor: Tensor) -> Tensor:
    return tensor
