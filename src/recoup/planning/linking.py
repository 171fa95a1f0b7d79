"""Which arguments of a call are what the call before it returned."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from recoup._core.saved_tensors import version_of

__all__ = ["Returned"]


class Returned:
    """The tensors that a call returned, to be told when they come back as arguments.

    They are not held: who uses them holds them.
    """

    __slots__ = ("_outputs",)

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._outputs = [(weakref.ref(output), version_of(output)) for output in outputs]

    def places_in(
        self, arguments: Sequence[Tensor], module: nn.Module
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the places of `arguments` at which there is an output, and which one it is.

        One that was changed in place since is another value, and is not told. Nor is any if
        `module` is sharded (FSDP2): nobody gathers its parameters when another block needs it run.

        Args:
            arguments: the tensors among the arguments of a call.
            module: which is called.
        """
        if hasattr(type(module), "unshard"):
            return (), ()
        found = {
            id(output): place
            for place, (ref, version) in enumerate(self._outputs)
            if (output := ref()) is not None and version_of(output) == version
        }
        pairs = [(at, found[id(arg)]) for at, arg in enumerate(arguments) if id(arg) in found]
        return tuple(at for at, _ in pairs), tuple(place for _, place in pairs)
