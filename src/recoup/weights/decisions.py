"""Decisions about draws, remembered for code that torch may run again in backward.

NOTE [ Decisions by frame, or by place in the stream ]

Rule 1. A region of recoup records the decisions made in it. torch.utils.checkpoint and similar
        functions run code again in backward without saying which forward it belongs to. The
        checkpoint frame of the saved-tensor hooks in force identifies it; where there is no frame
        (a reentrant checkpoint, or one within another), the place in the stream of the default
        generator does, since these functions restore it.
Rule 2. Such functions run code under no_grad or under saved-tensor hooks only, so only there a
        decision is recorded; the last few hundred are kept.
Rule 3. Code that runs again gets the recorded decision, or an error. A user's hook makes a decision
        of its own; it is recognized by running without saved-tensor hooks, without grad mode, and
        not within the backward of an autograd.Function.
Rule 4. A recorded decision holds only for a tensor that has not changed since.
Rule 5. A decision in evaluation is not recorded by place, since the next step may stand at the same
        one; but it spoils a decision recorded there, and its place is. Code that runs again in
        evaluation may be that one, so there it gets no decision that was recorded later. If none
        is found, that of the first run was one in evaluation only if this one is, and if no
        context ever switched the noise.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from recoup._core.generators import fingerprint
from recoup._core.rng import Counted, counted, skip
from recoup._core.saved_tensors import frame_in_force, pair_in_force
from recoup.errors import ChangedError, ReplayError

__all__ = ["Decisions", "may_run_again"]

T = TypeVar("T")
_MOST = 512


def may_run_again() -> bool:
    """Whether torch may run this code again in backward, or does so now (See Rule 2)."""
    if torch._C._current_graph_task_id() != -1:
        return True
    if torch.is_inference_mode_enabled():
        return False
    return not torch.is_grad_enabled() or pair_in_force() is not None


def _runs_again() -> bool:
    """Whether the code that runs in a backward is a recomputation, and not a hook (See Rule 3)."""
    if torch.is_grad_enabled() or pair_in_force() is not None:
        return True
    node: Any = torch._C._current_autograd_node()
    is_of_hooks = type(node).__name__.startswith("BackwardHookFunction")
    return isinstance(node, torch.autograd.function.BackwardCFunction) and not is_of_hooks


class _Made(NamedTuple):
    decision: Counted
    version: int
    is_spoilt: bool = False  # two decisions at one place are ambiguous


class Decisions:
    """The decisions of one kind, by frame and by the place in the stream (See Rule 1).

    Args:
        draws: returns whether a decision has a random draw.
    """

    def __init__(self, draws: Callable[[Any], bool]) -> None:
        self._draws = draws
        self._made: OrderedDict[int, _Made] = OrderedDict()
        self._by_frame: weakref.WeakKeyDictionary[Any, dict[int, _Made]]
        self._by_frame = weakref.WeakKeyDictionary()
        self._evaluated: OrderedDict[int, None] = OrderedDict()  # places of evaluations
        self._is_switched = False

    def __bool__(self) -> bool:
        return len(self._made) > 0 or len(self._by_frame) > 0

    def decide(
        self, make: Callable[[], T], name: str, version: int, *, is_open: bool, is_usual: bool
    ) -> T:
        """Return the decision of `make`, or the recorded one where this code runs again.

        Args:
            make: returns a value that can be compared.
            name: the name of the weight in errors.
            version: the version of the tensor that it is decided for.
            is_open: whether something may be drawn; False in an evaluation without noise.
            is_usual: whether something is drawn where no context turns noise on or off.
        """
        if not may_run_again():
            return make()
        if torch._C._current_graph_task_id() != -1:
            return self._found(make, name, version, is_open=is_open)
        place, frame = fingerprint(), frame_in_force()
        if not is_open and frame is None:
            self._spoil(place)
            self._evaluated[place] = None
            if len(self._evaluated) > _MOST:
                self._evaluated.popitem(last=False)
            return make()
        made = _Made(counted(make), version)
        if frame is not None:
            self._by_frame.setdefault(frame, {})[place] = made
        if is_open:
            self._is_switched |= self._draws(made.decision.value) is not is_usual
            self._remember(place, made)
        else:
            self._spoil(place)
        return made.decision.value

    def _remember(self, place: int, made: _Made) -> None:
        before = self._made.get(place, made)
        is_spoilt = before.is_spoilt or before.decision != made.decision
        self._made[place] = made._replace(is_spoilt=is_spoilt)
        self._made.move_to_end(place)
        if len(self._made) > _MOST:
            self._made.popitem(last=False)

    def _spoil(self, place: int) -> None:
        if place in self._made:
            self._made[place] = self._made[place]._replace(is_spoilt=True)

    def _found(self, make: Callable[[], T], name: str, version: int, *, is_open: bool) -> T:
        if not _runs_again():
            return make()
        place, frame = fingerprint(), frame_in_force()
        within: dict[int, _Made] = {} if frame is None else self._by_frame.get(frame, {})
        # Where the frame is known, decisions at this place outside of it do not count.
        made = within.get(place) if within else self._made.get(place)
        values = {each.decision.value: each for each in within.values()}
        if made is None and len(values) == 1:  # the stream was not restored, and need not be
            ((value, each),) = values.items()
            made = each._replace(decision=Counted(value, 0))
        if made is None:
            if not is_open and not self._is_switched:
                return make()  # See Rule 5
            raise ReplayError(_not_told(name, is_spoilt=False))
        if made.version != version:
            raise ChangedError(
                f"{name} was changed in place between forward and backward, and code that uses it "
                "is run again there. Step the optimizer after backward has passed every use of it."
            )
        if made.is_spoilt or (not is_open and not within and place in self._evaluated):
            raise ReplayError(_not_told(name, is_spoilt=True))
        skip(made.decision.num_seeds)
        return made.decision.value


def _not_told(name: str, *, is_spoilt: bool) -> str:
    said = f"{name} is read in a backward, by code that is run again there, and "
    if is_spoilt:
        return said + (
            "two forwards that gave it different draws stood at the same place of the random "
            "stream. Use use_reentrant=False, or recoup.checkpoint, or draw a number in between."
        )
    return said + (
        "it cannot be told which draw it had in forward. Let torch.utils.checkpoint preserve the "
        "random state (preserve_rng_state=True), or use recoup.checkpoint, which needs none."
    )
