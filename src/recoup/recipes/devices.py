"""Moving a model to the device on which a command runs."""

from __future__ import annotations

from torch import nn

__all__ = ["moved"]


def moved(module: nn.Module, device: str) -> None:
    """Move a module to the device given as ``--device``.

    Raises:
        ValueError: When torch cannot use the device here.
    """
    try:
        module.to(device)
        next(module.parameters()).cpu()  # Some devices, such as meta, hold no values.
    except (RuntimeError, AssertionError) as error:  # torch raises either
        raise ValueError(f"`--device` is {device}, which torch cannot use here.") from error
