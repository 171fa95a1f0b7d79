"""The links between calls: arguments that are outputs of the call before."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from recoup._core.saved_tensors import version_of

__all__ = ["Returned"]


class Returned:
    """The tensors that a call returned, recognized when they are arguments of a later call.

    They are referred to weakly.

    Args:
        outputs: the tensors.
    """

    __slots__ = ("_outputs",)

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._outputs = [(weakref.ref(output), version_of(output)) for output in outputs]

    def places_in(
        self, arguments: Sequence[Tensor], module: nn.Module
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the indices of the arguments that are outputs, and the indices of these outputs.

        An output that was changed in place since then does not count. No output counts if `module`
        is sharded (FSDP2), because FSDP2 would not gather its parameters when the backward of
        another block needs it run again.

        Args:
            arguments: the tensors among the arguments of a call.
            module: the module that is called.
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
