"""Tensors without values: those of torch's FakeTensorMode, which have shapes, types and devices.

NOTE [ Steps without values ]

Rule 1. Under a FakeTensorMode operators run without memory, and what reads a number fails. So
        nothing is compared there, every seed is 0, and every buffer counts as changed.
Rule 2. Bytes are those of the tensors that operators return. What a kernel allocates for a moment
        is not seen.
Rule 3. Times are counted instead of measured: the bytes that operators move and the operations of
        their products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

# The classes of tensors that operators compute with as they are.
PLAIN = frozenset((Tensor, nn.Parameter, FakeTensor))
_C: Any = torch._C


def is_without_values(*tensors: Tensor) -> bool:
    """Whether a FakeTensorMode is in force, or a tensor belongs to one."""
    if _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) is not None:
        return True
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)
