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

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from recoup._core.compile import never_compiled
from recoup._core.saved_tensors import Pair, pair_in_force, saving

__all__ = ["gradients_in_forward"]


@contextmanager
def gradients_in_forward() -> Generator[None]:
    """Let `torch.autograd.grad` use tensors that are saved within, in any region."""
    pair = pair_in_force()
    if pair is None:  # autograd has everything itself
        yield
        return
    at_hand: list[_AtHand] = []
    try:
        with saving(partial(_pack, at_hand, pair)):
            yield
    finally:
        for saved in at_hand:
            saved.tensor = None  # See Rule 2


@never_compiled
def _pack(at_hand: list[_AtHand], pair: Pair, tensor: Tensor) -> _AtHand:
    saved = _AtHand(tensor, pair)
    at_hand.append(saved)
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
