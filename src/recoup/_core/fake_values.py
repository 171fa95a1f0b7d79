"""Tensors without values: those of torch's FakeTensorMode, which have shapes, types and devices.

NOTE [ Steps without values ]

Rule 1. Under a FakeTensorMode operators run without memory, and what reads a number fails. So
        nothing is compared there, every seed is 0, and no buffer has values to give back.
Rule 2. Bytes are those of the tensors that operators return. What a kernel allocates for a moment
        is not seen.
Rule 3. Times are counted instead of measured: the bytes that operators move and the operations of
        their products.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

# The classes of tensors that operators compute with as they are.
PLAIN = frozenset((Tensor, nn.Parameter, FakeTensor))
_C: Any = torch._C


def is_without_values() -> bool:
    """Whether a FakeTensorMode is in force."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) is not None


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has numbers, which operators can read here."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor) or is_without_values())


def check_is_in_its_mode(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError if a tensor has no values, and the mode that it is of is not in force."""
    if not is_without_values() and any(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise ValueError(
            "Tensors of a FakeTensorMode take no memory that could be counted outside of it. "
            "Measure, or plan, within that mode; or use recoup.estimate."
        )
