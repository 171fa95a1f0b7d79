"""Recorded operators: operators of a block of code, with their arguments as views of storages.

NOTE [ Operators over storages ]

Rule 1. Operators are recorded below autograd and autocast. A tensor that they take or make is
        identified by its storage (a `RecordedStorage`) and by its view of that storage (a
        `Layout`); so views are not recorded, and in-place operators need no special treatment.
Rule 2. A storage comes from outside of the block, and is kept; or an operator makes it; or it comes
        from outside, and an operator of the block writes to it. A replay then works on a copy from
        before the change, and has no effect outside. A storage that is overwritten as a whole
        starts blank.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recoup._core.lazy_values import HasTensor
from recoup.regions.operator_draws import Draw

__all__ = [
    "Layout",
    "Origin",
    "RecordedOp",
    "RecordedStorage",
    "RecordedTensor",
    "layout_of",
]


class Layout(NamedTuple):
    """The view that a tensor has of its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool


def layout_of(tensor: Tensor) -> Layout:
    """Return the view that `tensor` has of its storage."""
    return Layout(
        tensor.size(),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


class Origin(Enum):
    """The origin of the content of a storage at the beginning of a replay (See Rule 2)."""

    OUTSIDE = "outside"
    MADE = "made"
    COPY = "copy"
    BLANK = "blank"


class RecordedStorage:
    """A storage that operators of a block take, make or write to.

    Attributes:
        origin: the origin of its content.
        num_bytes: its size in bytes.
        device: its device.
        kept: the tensors from outside, by layout; None is the layout of those without a storage.
        copy: the bytes that it begins with, if its origin is a copy.
    """

    __slots__ = ("copy", "device", "kept", "num_bytes", "origin")

    def __init__(self, origin: Origin, device: torch.device, num_bytes: int = 0) -> None:
        self.origin = origin
        self.device = device
        self.num_bytes = num_bytes
        self.kept: dict[Layout | None, HasTensor] = {}
        self.copy: HasTensor | None = None


class RecordedTensor(NamedTuple):
    """A tensor among the arguments or results of a recorded operator."""

    storage: RecordedStorage
    layout: Layout | None


class RecordedOp(NamedTuple):
    """An operator with its arguments, each tensor in them replaced by a `RecordedTensor`.

    Attributes:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
        takes: the storages that it reads.
        makes: the tensors with a new storage that it returns, by their position in the result.
        changes: the storages that it makes or writes to.
        draw: its draw of random numbers, if it drew.
        with_grad: whether grad mode was on: some kernels make a workspace for backward only then.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    takes: frozenset[RecordedStorage]
    makes: dict[int, RecordedTensor]
    changes: frozenset[RecordedStorage]
    draw: Draw | None
    with_grad: bool
