"""What was decided in code that others may run again.

NOTE [ Told by the place in the stream ]

Rule 1. A region of ours writes down what is decided in it. torch.utils.checkpoint and its likes run
        code again in backward without telling anyone which forward it belonged to; they do put the
        default generator back. So the place at which its stream stands names the forward.
Rule 2. That happens under no_grad or under saved-tensor hooks only, and only there a decision is
        written down; the last few hundred are remembered.
Rule 3. What was decided under hooks will be asked for again, so in a backward it is found or that
        is an error. What was decided under no_grad may have been an evaluation: then a read outside
        of any forward is that of a hook in backward, which sees what is there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import torch

from recoup.errors import ReplayError
from recoup.residuals.hooks import pair_in_force
from recoup.residuals.seeds import Counted, counted, fingerprint, skip

__all__ = ["Decisions", "may_run_again"]

T = TypeVar("T")
_MOST = 512


def may_run_again() -> bool:
    """Whether code of others may run this again in backward, or does (See Rule 2)."""
    if torch._C._current_graph_task_id() != -1:
        return True
    if torch.is_inference_mode_enabled():
        return False
    return not torch.is_grad_enabled() or pair_in_force() is not None


class Decisions:
    """The decisions of one kind, by the place in the stream at which they were made."""

    def __init__(self) -> None:
        self._made: OrderedDict[int, Counted | None] = OrderedDict()
        self._has_hooked = False

    def __bool__(self) -> bool:
        return bool(self._made)

    def decide(self, make: Callable[[], T], name: str) -> T:
        """Return what `make` decides, or what it decided when this code ran first.

        Args:
            make: returns a value that can be compared, and is false where nothing is decided.
            name: what an error calls it.
        """
        if not may_run_again():
            return make()
        place = fingerprint()
        if torch._C._current_graph_task_id() != -1:
            return self._found(place, make, name)
        decision = counted(make)
        before = self._made.get(place, decision)
        # Two decisions at one place cannot be told apart: neither may be handed out.
        self._made[place] = decision if before is not None and before == decision else None
        self._made.move_to_end(place)
        self._has_hooked = self._has_hooked or pair_in_force() is not None
        if len(self._made) > _MOST:
            self._made.popitem(last=False)
        return decision.value

    def _found(self, place: int, make: Callable[[], T], name: str) -> T:
        decision = self._made.get(place)
        if decision is not None:
            skip(decision.num_seeds)
            return decision.value
        if not self._made:
            return make()
        if not self._has_hooked:
            value = make()
            if not value:
                return value  # See Rule 3
        raise ReplayError(
            f"{name} is read in a backward, by code that is run again there, and it cannot be told "
            "which draw it had in forward. Let torch.utils.checkpoint preserve the random state "
            "(preserve_rng_state=True), or use recoup.checkpoint, which needs none."
        )
