"""Modules of a model that could train in constant memory, which a plan does not do for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

__all__ = ["constant_memory_of"]


def constant_memory_of(model: nn.Module) -> list[str]:
    """Return a sentence that names the modules for which `memory="constant"` can be set.

    Those are modules with an inverse and an attribute `memory`: chains of invertible modules, and
    flows. Of nested modules the outermost counts.
    """
    found: list[tuple[str, str]] = []
    inner: set[int] = set()
    for name, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        if id(module) in inner or not _is_invertible(module):
            continue
        inner.update(map(id, module.modules()))
        if cast("Any", module).memory != "constant":
            found.append((name, type(module).__name__))
    if not found:
        return []
    names = ", ".join(f"`{name or 'model'}` ({kind})" for name, kind in found)
    first = f"model.{found[0][0]}" if found[0][0] else "model"
    sentence = (
        f"A plan inverts nothing, and {names} can be inverted: without a plan, "
        f'`{first}.memory = "constant"` keeps outputs alone, which may take less.'
    )
    return [sentence]


def _is_invertible(module: nn.Module) -> bool:
    kind: type[nn.Module] = type(module)
    return isinstance(getattr(kind, "memory", None), property) and hasattr(kind, "inverse")
