"""What was decided in code that others may run again.

NOTE [ Told by the place in the stream ]

Rule 1. A region of ours writes down what is decided in it. torch.utils.checkpoint and its likes run
        code again in backward without telling anyone which forward it belonged to; they do put the
        default generator back. So the place at which its stream stands names the forward.
Rule 2. That happens under no_grad or under saved-tensor hooks only, and only there a decision is
        written down; the last few hundred are remembered.
Rule 3. Code that is run again in backward is run with grad mode on, or under hooks. There a
        decision is found, or it is an error; anything else in a backward is a hook of the user's,
        which decides for itself.
Rule 4. A decision that is found holds for a tensor that has not changed since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from recoup.errors import ChangedError, ReplayError
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
    """The decisions of one kind, by the place in the stream at which they were made.

    Args:
        draws: whether there is a draw in what was decided; without one it needs no memory.
    """

    def __init__(self, draws: Callable[[Any], bool]) -> None:
        self._draws = draws
        self._made: OrderedDict[int, tuple[Counted | None, int]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._made)

    def decide(self, make: Callable[[], T], name: str, version: int, *, is_open: bool) -> T:
        """Return what `make` decides, or what it decided when this code ran first.

        Args:
            make: returns a value that can be compared.
            name: what an error calls it.
            version: of the tensor that it is decided for.
            is_open: whether it may come out one way or the other; an evaluation does not.
        """
        if not may_run_again():
            return make()
        place = fingerprint()
        if torch._C._current_graph_task_id() != -1:
            return self._found(place, make, name, version)
        if not is_open:
            self._made.pop(place, None)
            return make()
        decision = counted(make)
        before, _ = self._made.get(place, (decision, 0))
        # Two decisions at one place cannot be told apart: neither may be handed out.
        is_same = before is not None and before == decision
        self._made[place] = (decision if is_same else None, version)
        self._made.move_to_end(place)
        if len(self._made) > _MOST:
            self._made.popitem(last=False)
        return decision.value

    def _found(self, place: int, make: Callable[[], T], name: str, version: int) -> T:
        if not torch.is_grad_enabled() and pair_in_force() is None:
            return make()  # a hook's
        decision, version_then = self._made.get(place, (None, version))
        if version_then != version:
            raise ChangedError(
                f"{name} was changed in place between forward and backward, and code that uses it "
                "is run again there. Step the optimizer after backward has passed every use of it."
            )
        if decision is not None:
            skip(decision.num_seeds)
            return decision.value
        value = make()
        if not self._draws(value):
            return value
        raise ReplayError(
            f"{name} is read in a backward, by code that is run again there, and it cannot be told "
            "which draw it had in forward. Let torch.utils.checkpoint preserve the random state "
            "(preserve_rng_state=True), or use recoup.checkpoint, which needs none."
        )
