"""What was decided in code that others may run again.

NOTE [ Told by the place in the stream ]

Rule 1. A region of ours writes down what is decided in it. torch.utils.checkpoint and its likes run
        code again in backward without telling anyone which forward it belonged to; they do put the
        default generator back. So the place at which its stream stands names the forward.
Rule 2. That happens under no_grad or under saved-tensor hooks only, and only there a decision is
        written down; the last few hundred are remembered.
Rule 3. In a backward nothing is decided anew: a decision is found, or it is an error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from recoup.errors import ReplayError
from recoup.residuals.hooks import pair_in_force
from recoup.residuals.seeds import Counted, counted, fingerprint, skip

__all__ = ["Decisions"]

T = TypeVar("T")
_MOST = 512


class Decisions:
    """The decisions of one kind, by the place in the stream at which they were made."""

    def __init__(self) -> None:
        self._made: OrderedDict[int, Counted | None] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copy has not been run yet

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._made = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._made)

    def decide(self, make: Callable[[], T], name: str) -> T:
        """Return what `make` decides, or what it decided when this code ran first.

        Args:
            make: returns a value that can be compared, and is false where nothing is decided.
            name: what an error calls it.
        """
        if torch._C._current_graph_task_id() != -1:
            return self._found(make, name)
        if torch.is_inference_mode_enabled() or (
            torch.is_grad_enabled() and pair_in_force() is None
        ):
            return make()
        place = fingerprint()
        decision = counted(make)
        before = self._made.get(place, decision)
        # Two decisions at one place cannot be told apart: neither may be handed out.
        self._made[place] = decision if before is not None and before == decision else None
        self._made.move_to_end(place)
        if len(self._made) > _MOST:
            self._made.popitem(last=False)
        return decision.value

    def _found(self, make: Callable[[], T], name: str) -> T:
        decision = self._made.get(fingerprint())
        if decision is not None:
            skip(decision.num_seeds)
            return decision.value
        if not self._made:
            value = make()
            if not value:
                return value
        raise ReplayError(
            f"{name} is read in a backward, by code that is run again there, and it cannot be told "
            "which draw it had in forward. Let torch.utils.checkpoint preserve the random state "
            "(preserve_rng_state=True), or use recoup.checkpoint, which needs none."
        )
