"""Sources of values: how a tensor that is not kept is made again when backward asks for it.

NOTE [ A source and its slots ]

Rule 1. A value that was changed in place before it was saved can no longer be made again, so the
        tensor itself is kept. Changing it after it was saved is an error in backward: a tensor
        without memory shares the value's version counter and reveals the change.
Rule 2. The slots of a source share one recomputed value: it is made when the first slot is unpacked
        and freed after the last, so a weight that is used at every time step is made once. It is
        freed at the end of a backward even if some slot was not unpacked.
Rule 3. A source holds no node of the graph that holds it.
"""

from __future__ import annotations

import threading
import weakref
from typing import ClassVar

import torch
from torch import Tensor

from recoup._core.autocast_copies import Cast
from recoup._core.compile import never_compiled
from recoup._core.memory_layout import geometry_of
from recoup._core.save_observer import Way, current
from recoup._core.saved_tensors import Packed, is_in_backward, version_of, when_backward_ends
from recoup.errors import ChangedError, ReplayError

_NONE: set[int] = set()  # never added to


class Source:
    """The recipe of a value: a subclass implements `make`, which makes the value again.

    Args:
        name: the name of the value in error messages.
        lock: held while the value is made; sources that are made together share one.

    Attributes:
        dtype: the dtype of the value.
        stands_for: the name of a parameter that code may want, to change it; "" if there is none.
    """

    way: ClassVar[Way] = "recompute"

    def __init__(self, name: str, lock: threading.RLock | None = None) -> None:
        self.name = name
        self._lock = threading.RLock() if lock is None else lock
        self._slots: list[weakref.ref[_Slot]] = []
        self._waiting: set[int] = _NONE  # the slots that will still ask for what was made

    # As long as nothing was made or saved; set on the class, since most sources are short-lived.
    stands_for = ""
    dtype = torch.float32
    _made: Tensor | None = None
    _witness: Tensor | None = None  # See Rule 1
    _version = 0
    _is_exposed = False

    def make(self) -> None:
        """Make the value again and `give` it."""
        raise NotImplementedError

    @property
    def is_wanted(self) -> bool:
        """Whether autograd still holds any slot."""
        return any(ref() is not None for ref in self._slots)

    def give(self, made: Tensor) -> None:
        """Store the recomputed value if autograd still holds any slot (See Rule 2)."""
        self._waiting = {id(slot) for ref in self._slots if (slot := ref()) is not None}
        if self._waiting:
            self._made = made.detach()
            if is_in_backward():
                when_backward_ends(self._forget)

    def watch(self, tensor: Tensor) -> None:
        """Remember `tensor` as it is now: from here on it is the value."""
        self.dtype = tensor.dtype
        self._version = version_of(tensor)

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor`, in the memory of the value, still has the numbers of it."""
        if version_of(tensor) != self._version or tensor.dtype is not self.dtype:
            return False
        return not (self._is_exposed or tensor.is_conj() or tensor.is_neg())

    def slot(self, tensor: Tensor, cast: Cast | None = None) -> Packed:
        """Return what autograd saves in place of `tensor`, a view or a cast of the value."""
        slot = _Slot(self, tensor, cast)
        if self._witness is None and cast is None:  # it has the version counter of the value
            with torch._C.DisableTorchFunctionSubclass():  # it may be a value
                self._witness = tensor.detach()
                self._witness.data = tensor.new_empty(0)
        self._slots.append(weakref.ref(slot))
        if current.observer is not None:
            current.observer.saved(tensor, slot, self.way)
        return slot

    def get(self, slot: _Slot) -> Tensor:
        """Return the value for a slot, and make it if it was not made yet."""
        with self._lock:
            self._check()
            if self._made is None:
                self.make()
            made = self._made
            if made is None:
                raise ReplayError(
                    f"{self.name} could not be recomputed: its second run ended without it. A "
                    "region must do the same again: look for outside state that it reads."
                )
            self._waiting.discard(id(slot))
            if not self._waiting or not is_in_backward():
                self._forget()
            return made

    def _check(self) -> None:
        """Raise if the value was changed in place since it was watched (See Rule 1)."""
        if self._witness is not None and version_of(self._witness) != self._version:
            raise ChangedError(
                f"{self.name} is recomputed in backward, but was changed in place after an "
                "operator had saved it. Change a clone instead."
            )

    def _forget(self) -> None:
        with self._lock:
            self._made = None
            self._waiting = _NONE


class _Slot:
    """The object that autograd saves in place of a value, or of a view or cast of it."""

    __slots__ = ("__weakref__", "_cast", "_geometry", "_source")

    def __init__(self, source: Source, tensor: Tensor, cast: Cast | None) -> None:
        self._source = source
        self._cast = cast
        self._geometry = geometry_of(tensor)

    @never_compiled
    def get(self) -> Tensor:
        made = self._source.get(self)
        made = made if self._cast is None else self._cast(made)
        return made.as_strided(*self._geometry)
