"""Modules of a model that could train in constant memory, which a plan does not choose."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["constant_memory_of"]


def constant_memory_of(model: nn.Module) -> list[str]:
    """Return a sentence for the modules of a model that invert themselves if they are told to.

    Those are modules with an inverse and a choice of `memory`: chains of invertible modules, and
    flows. Of modules within one another the outermost counts.
    """
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if any(not outer or name.startswith(f"{outer}.") for outer, _ in found):
            continue
        if callable(getattr(module, "inverse", None)) and isinstance(
            getattr(type(module), "memory", None), property
        ):
            found.append((name, module))
    told: list[Any] = [(name, module) for name, module in found if _memory(module) != "constant"]
    if not told:
        return []
    names = ", ".join(f"`{name or 'model'}` ({type(module).__name__})" for name, module in told)
    first = f"model.{told[0][0]}" if told[0][0] else "model"
    sentence = (
        f"A plan inverts nothing, and {names} can be inverted: without a plan, "
        f'`{first}.memory = "constant"` keeps outputs alone, which may take less.'
    )
    return [sentence]


def _memory(module: Any) -> Any:
    return module.memory
