"""Moving a model to where a command was told to run."""

from __future__ import annotations

from torch import nn

__all__ = ["moved"]


def moved(module: nn.Module, device: str) -> None:
    """Move a module to what was given as ``--device``.

    Raises:
        ValueError: torch cannot use it here.
    """
    try:
        module.to(device)
        next(module.parameters()).cpu()  # From some devices nothing comes back.
    except (RuntimeError, AssertionError) as error:  # torch says so in either way
        raise ValueError(f"`--device` is {device}, which torch cannot use here.") from error
