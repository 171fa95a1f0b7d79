"""Reparametrizations that the uses of a tied parameter share (``tied="same"``).

A step has one draw for each reparametrization. So the uses of a parameter have one draw if they
have one reparametrization: the same object, under each of the names. A later call finds the object
of the first one by the parameter.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from recoup.weights.choosing import Named
from recoup.weights.reparametrization import Reparametrization

# The first use of a parameter: what it has, and its module and key, by the kind and the parameter.
_Use = tuple[weakref.ref[Reparametrization], weakref.ref[nn.Module], str]
_uses: dict[tuple[str, int], _Use] = {}


def shared(step: Reparametrization, each: Named) -> Reparametrization:
    """Return what another use of a parameter has, or else `step`, which is of its own.

    Raises:
        ValueError: when the other use has other arguments.
    """
    use = _uses.get((step.kind, id(each.parameter)))
    other = None if use is None else use[0]()
    if other is not None and repr(other) != repr(step):
        raise ValueError(
            f'`tied` is "same", but another use of `{each.name}` has {other!r}, and this one would '
            f"have {step!r}. Give both the same arguments."
        )
    return other or step


def share(step: Reparametrization, each: Named) -> None:
    """Let other uses find what this one has; if it is another's, give this one its parameters."""
    place, name = (step.kind, id(each.parameter)), step.added(each.key)
    use = _uses.get(place)
    owner = None if use is None or use[0]() is not step else use[1]()
    if use is None or owner is None:
        step.breaks_graph = True  # a graph would take the seeds of one use only

        def forget(_: Any) -> None:
            _uses.pop(place, None)

        # The reparametrization goes with the module, and with it the parameter.
        _uses[place] = weakref.ref(step, forget), weakref.ref(each.owner), each.key
        step.applied_to(each.owner, each.key)
    elif name and each.owner is not owner:
        each.owner.register_parameter(name, owner._parameters[step.added(use[2])])
