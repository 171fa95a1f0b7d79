"""Gradients that an invertible module takes while forward runs.

NOTE [ Residuals that are used before the call ends ]

Rule 1. A call that takes gradients (the log-determinant of a network) needs its own residuals
        before it has ended, and so before the region around it can make them again: some second
        runs keep nothing at all. So the tensors that such a call saves are held here until the call
        ends, whatever the pair beneath does with them.
Rule 2. After the call nothing is held here: backward gets the tensors from the pair beneath, which
        packed each tensor once, in the order of the saves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from recoup._core.compile import never_compiled
from recoup._core.restoring import Restoring
from recoup._core.saved_tensors import Pair, pair_in_force, saving

__all__ = ["GradientsInForward"]


class GradientsInForward(Restoring):
    """A context in which `torch.autograd.grad` can use tensors saved within, in any region."""

    __slots__ = ("_at_hand", "_hooks")

    def __init__(self) -> None:
        super().__init__()
        self._hooks: saving | None = None
        self._at_hand: list[_AtHand] = []

    def __enter__(self) -> None:
        pair = pair_in_force()
        if pair is not None:  # without one, autograd has everything itself
            self._hooks = saving(partial(self._pack, pair))
            self._hooks.__enter__()

    def restore(self) -> None:
        if self._hooks is not None:
            self._hooks.restore()
            self._hooks = None  # it holds a method of ours: a reference cycle
        for saved in self._at_hand:
            saved.tensor = None  # See Rule 2
        self._at_hand.clear()

    @never_compiled
    def _pack(self, pair: Pair, tensor: Tensor) -> _AtHand:
        saved = _AtHand(tensor, pair)
        self._at_hand.append(saved)
        return saved


class _AtHand:
    """A saved tensor: held until the context ends, then unpacked by the pair beneath."""

    __slots__ = ("_packed", "_unpack", "tensor")

    def __init__(self, tensor: Tensor, pair: Pair) -> None:
        self._packed: Any = pair[0](tensor)
        self._unpack = pair[1]
        self.tensor: Tensor | None = tensor.detach()

    @never_compiled
    def get(self) -> Tensor:
        """Return the tensor."""
        return self._unpack(self._packed) if self.tensor is None else self.tensor
