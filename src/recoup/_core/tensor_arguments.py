"""Checks of arguments that are tensors, modules, devices and types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recoup._arguments import check_type, shown

__all__ = ["check_modules", "check_place", "check_tensors"]


def check_tensors(**given: object) -> None:
    """Raise ValueError unless each argument is a tensor."""
    check_type(Tensor, "a tensor", **given)


def check_modules(**given: object) -> None:
    """Raise ValueError unless each argument is an `nn.Module`."""
    check_type(nn.Module, "an nn.Module", **given)


def check_place(device: Any = None, dtype: Any = None, *, is_real: bool = False) -> None:
    """Raise ValueError unless the device is there, and the type is one of floating-point numbers.

    Args:
        device: the device, or None.
        dtype: the type, or None.
        is_real: whether complex types are left out.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f'`device` is {shown(device)}, but must be a device that is there, such as "cpu".'
        ) from error
    is_type = isinstance(dtype, torch.dtype)
    if dtype is not None and not (
        is_type and (dtype.is_floating_point or (dtype.is_complex and not is_real))
    ):
        raise ValueError(
            f"`dtype` is {shown(dtype)}, but must be a floating-point type such as torch.float32."
        )
