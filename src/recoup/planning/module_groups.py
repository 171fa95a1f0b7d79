"""Groups of consecutive modules of an `nn.Sequential`, which are blocks together.

NOTE [ Groups of modules ]

Rule 1. A convolution keeps its input, and the ReLU before it keeps its output, which is the same
        tensor. As blocks of their own each would seem to keep one. So a module with a matrix or a
        kernel begins a group, and what follows it (norms, activations, pooling) belongs to it.
Rule 2. While a plan is followed, the sequence calls its groups in place of its modules, and each
        group calls its modules, with their hooks.
Rule 3. A group is made once for a sequence, so that all plans for it have the same blocks. A
        sequence whose modules were replaced since, or that got more, runs as it is.
Rule 4. A forward may take the modules of a sequence without calling it (features of an image, layer
        by layer). Then each module is a block of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["ModuleGroup", "are_groups_of", "groups_of", "kind_of", "modules_of", "run_groups"]


class ModuleGroup(nn.Module):
    """Consecutive modules of a sequence.

    Args:
        sequence: the sequence.
        modules: the modules, in order.
    """

    def __init__(self, sequence: nn.Sequential, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self._sequence = weakref.ref(sequence)

    @property
    def sequence(self) -> nn.Sequential | None:
        """The sequence, if it is alive."""
        return self._sequence()

    def forward(self, input: Any) -> Any:
        """Call the modules one after another."""
        for module in self.parts:
            input = module(input)
        return input


_Groups = list[tuple[str, ModuleGroup]]
_groups: WeakKeyDictionary[nn.Sequential, tuple[list[nn.Module], _Groups]] = WeakKeyDictionary()


def groups_of(sequence: nn.Sequential) -> _Groups:
    """Return the groups of a sequence with the names of their modules; none if it cannot have any.

    Args:
        sequence: a sequence whose forward calls its modules one after another.
    """
    if type(sequence).forward is not nn.Sequential.forward or _has_own_forward(sequence):
        return []
    found_modules: dict[str, nn.Module | None] = vars(sequence)[
        "_modules"
    ]  # one may be there twice
    modules = [module for module in found_modules.values() if module is not None]
    if len(modules) != len(found_modules) or any(
        hasattr(type(each), "unshard") for each in modules
    ):
        return []  # FSDP2 gathers the parameters of the modules that it knows
    before, found = _groups.get(sequence, ([], []))
    if [*map(id, before)] != [*map(id, modules)]:
        found = list(_grouped(sequence, list(found_modules), modules))
        _groups[sequence] = modules, found
    return found


def _has_own_forward(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return forward is not None and not hasattr(forward, "group")  # else a plan follows it


def _grouped(
    sequence: nn.Sequential, names: Sequence[str], modules: Sequence[nn.Module]
) -> Iterator[tuple[str, ModuleGroup]]:
    starts = [0, *(place for place, each in enumerate(modules) if place and _begins(each))]
    for start, stop in zip(starts, [*starts[1:], len(modules)], strict=True):
        name = names[start] if stop - start == 1 else f"{names[start]}-{names[stop - 1]}"
        yield name, ModuleGroup(sequence, modules[start:stop])


def _begins(module: nn.Module) -> bool:
    """Whether a module begins a group: it has a matrix or a kernel (See Rule 1)."""
    return any(parameter.ndim > 1 for parameter in module.parameters())


def modules_of(block: nn.Module) -> list[nn.Module]:
    """Return the module of the model that a block is, or those of a group."""
    return list(block.parts) if isinstance(block, ModuleGroup) else [block]


def are_groups_of(groups: Sequence[ModuleGroup], sequence: nn.Module) -> bool:
    """Whether these are the groups of all modules that a sequence has now (See Rule 3)."""
    own: dict[str, nn.Module | None] = vars(sequence)["_modules"]
    return [*map(id, own.values())] == [id(part) for group in groups for part in group.parts]


def run_groups(groups: Sequence[ModuleGroup], input: Any) -> Any:
    """Call the groups of a sequence (See Rule 2)."""
    for group in groups:
        input = group.forward(input)  # no hook takes the group for a module of the model
    return input


def kind_of(module: nn.Module) -> str:
    """Return the class of a block, or those of the modules of a group."""
    return ", ".join(type(each).__name__ for each in modules_of(module))
