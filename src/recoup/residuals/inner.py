"""Gradients that are taken while forward runs.

NOTE [ Asked for before the end ]

Rule 1. A call that is made of gradients (the log-determinant of a network) asks for what it saved
        before it has ended, and so before the region around it can give anything back: its slots
        are empty until its first run is over, and other second runs keep nothing at all. So what
        such a call saves is at hand here until the call ends, whatever the pair beneath made of it.
Rule 2. After the call nothing is held here: backward is given what the pair beneath gives, which
        was asked about each tensor once, in the order of the saves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recoup.residuals.compiler import never_compiled
from recoup.residuals.hooks import Pair, pair_in_force, saving

__all__ = ["GradientsWithin"]


class GradientsWithin:
    """Within it, `torch.autograd.grad` may ask for what was saved within, in any region."""

    __slots__ = ("_at_hand", "_beneath", "_hooks")

    def __init__(self) -> None:
        self._beneath: Pair | None = None
        self._hooks: saving | None = None
        self._at_hand: list[_AtHand] = []

    def __enter__(self) -> None:
        self._beneath = pair_in_force()
        if self._beneath is not None:  # without one, autograd has everything itself
            self._hooks = saving(self._pack, _unpack)
            self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
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
    """A tensor that autograd saved: itself for a while, then what the pair beneath has."""

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
