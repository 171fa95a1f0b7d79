"""Offloading: saved-tensor hooks that move states to host memory."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from recoup._core.saved_tensors import Pair

__all__ = ["moved_to_host"]


def moved_to_host(beneath: Pair | None) -> Pair:
    """Return hooks that copy a tensor to host memory, and back to where it was.

    The hooks beneath, if there are any, pack and unpack the copy instead.

    Args:
        beneath: the pair of hooks beneath, or None.
    """

    def pack(tensor: Tensor) -> Any:
        copy = _to_host(tensor.detach())
        return (copy if beneath is None else beneath[0](copy)), tensor.device

    def unpack(packed: Any) -> Tensor:
        held, device = cast("tuple[Any, torch.device]", packed)
        copy: Tensor = held if beneath is None else beneath[1](held)
        return copy.to(device, non_blocking=True) if copy.device != device else copy

    return pack, unpack


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.clone()
    # Copies of pinned memory are ordered by the stream: the copy back waits for this one.
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
