"""Reparametrizations that all uses of a tied parameter share.

NOTE [ One object, one draw ]

Rule 1. A step has one draw for each reparametrization. So the uses of a parameter have one draw
        if they have one reparametrization: the same object, under each of the names.
Rule 2. A later call finds the object of the first call by the parameter. Its uses then belong to
        the application of the first call, and share the draws of the steps around them.
Rule 3. The first use says whether draws are made by row (see `row_draws`); any use can do both.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import nn

from recoup.weights.choosing import Named
from recoup.weights.reparametrization import Reparametrization

__all__ = ["check_tied", "other_use", "remember", "share_parameters"]


class _Use(NamedTuple):
    parameter: weakref.ref[nn.Parameter]
    step: weakref.ref[Reparametrization]
    owner: weakref.ref[nn.Module]
    key: str


_uses: dict[tuple[str, int], _Use] = {}  # the first one, by the kind and the parameter (Rule 2)


def check_tied(tied: str) -> bool:
    """Return whether uses share a draw, or raise if `tied` is no choice."""
    if tied not in ("own", "same"):
        raise ValueError(
            f'`tied` is {tied!r}, but must be "own" (each name of a tied parameter has a draw of '
            'its own) or "same" (they share one).'
        )
    return tied == "same"


def other_use(step: Reparametrization, each: Named) -> Reparametrization | None:
    """Return the reparametrization that another use of a parameter shares, if there is one.

    Args:
        step: the one that this use would have of its own, fitted to it.
        each: this use.

    Raises:
        ValueError: when the other one has other arguments.
    """
    use = _uses.get((step.kind, id(each.parameter)))
    other = None if use is None or use.parameter() is not each.parameter else use.step()
    if other is None:
        return None
    if repr(other) != repr(step):
        raise ValueError(
            f'`tied` is "same", but another use of `{each.name}` has {other!r}, and this one would '
            f"have {step!r}. Give both the same arguments."
        )
    return other


def remember(step: Reparametrization, each: Named) -> None:
    """Let other uses of a parameter find the reparametrization that this one has."""
    place = (step.kind, id(each.parameter))

    def forget(_: Any) -> None:
        _uses.pop(place, None)

    step.breaks_graph = True  # a graph would take the seeds of one use only
    parameter = weakref.ref(each.parameter, forget)
    _uses[place] = _Use(parameter, weakref.ref(step), weakref.ref(each.owner), each.key)


def share_parameters(step: Reparametrization, each: Named) -> None:
    """Give another use of a parameter the parameter that was added beside the first one."""
    use = _uses[step.kind, id(each.parameter)]
    owner, name = use.owner(), step.added(each.key)
    if name and owner is not None and each.owner is not owner:
        each.owner.register_parameter(name, owner._parameters[step.added(use.key)])
