"""The draws of weights that are read in checkpointed code, for when torch runs that code again.

NOTE [ Which forward runs again ]

Rule 1. A region of recoup records the draws in it. torch.utils.checkpoint and functions like it run
        code again in backward without saying which forward the code belongs to. They first run it
        under saved-tensor hooks, which autograd holds until it needs the code no more. So a read
        under hooks is recorded as long as the hooks are alive, also if nothing is drawn.
Rule 2. Code that runs again gets the recorded draw if all records agree. If they do not, the one
        that was recorded at the same position of the default generator's stream counts, since
        these functions restore the stream. If that does not tell either, it is an error.
Rule 3. A position counts only if the stream was restored. Otherwise it cannot be at a position
        where a recorded read drew, nor at one before the latest that was seen: at a recorded read,
        or at the end of a forward with such a read.
Rule 4. A reentrant checkpoint first runs code without gradients, as any evaluation does, and so
        without hooks. It is an error if such code runs again and something might be drawn. Within
        its backward, which is that of an autograd.Function, other checkpoints may have hooks
        again; so there what was drawn without gradients is among the records, too.
Rule 5. A hook of a user reads a weight in backward for the first time. It is recognized by running
        without saved-tensor hooks, without gradients, and not in the backward of an
        autograd.Function.
Rule 6. A recorded draw is for a tensor that has not changed since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

from recoup._core.generators import fingerprint
from recoup._core.rng import counted, skip
from recoup._core.saved_tensors import is_in_backward, pair_in_force
from recoup.errors import ChangedError, ReplayError
from recoup.weights.reparametrization import Drawn

__all__ = ["CheckpointedDraws", "may_run_again"]

_MAX_READS = 1024  # of one pair of hooks, which may be in force for a whole training


def may_run_again() -> bool:
    """Whether torch may run this code again in backward, or does so now."""
    if is_in_backward():
        return True
    if torch.is_inference_mode_enabled():
        return False
    return not torch.is_grad_enabled() or pair_in_force() is not None


class _Read(NamedTuple):
    num_seeds: int
    version: int


_Reads = dict[tuple[Drawn, ...], dict[int, _Read]]  # by what was drawn, and by position


class CheckpointedDraws:
    """The draws that one weight had in code that torch may run again (See Rule 1)."""

    has_latest_read: ClassVar[bool] = False  # whether no forward has ended since the latest read
    _latest_position: ClassVar[int] = 0
    _restored: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()  # second runs (See Rule 3)

    def __init__(self) -> None:
        self._by_hooks: weakref.WeakKeyDictionary[Any, _Reads] = weakref.WeakKeyDictionary()
        self._without_hooks: _Reads = {}
        self._has_drawn = False

    def __bool__(self) -> bool:
        return self._has_drawn or bool(self._by_hooks)

    def resolve(
        self, draw: Callable[[], tuple[Drawn, ...]], name: str, version: int, *, is_open: bool
    ) -> tuple[Drawn, ...]:
        """Return the result of `draw`, or the recorded one where this code runs again.

        Args:
            draw: returns the draws of the weight in the forward in progress.
            name: the name of the weight in errors.
            version: the version of the raw weight.
            is_open: whether something random may be drawn; False in an evaluation without noise.
        """
        if not may_run_again():
            return draw()
        hooks = _hooks_in_force()
        if is_in_backward():
            if hooks is None and not torch.is_grad_enabled() and not _is_in_function():
                return draw()  # See Rule 5
            return self._again(draw, name, version, hooks, is_open)
        if hooks is None and not is_open:
            return draw()
        position = fingerprint()
        made = counted(draw)
        drawn: tuple[Drawn, ...] = made.value
        is_random = any(each.step.is_random for each in drawn)
        self._has_drawn = self._has_drawn or is_random
        if hooks is not None:
            CheckpointedDraws._latest_position = position
            CheckpointedDraws.has_latest_read = True
        if hooks is not None or is_random:
            reads = self._without_hooks
            if hooks is not None:
                reads = self._by_hooks.setdefault(hooks, {})
            by_position = reads.setdefault(drawn, {})
            by_position[position] = _Read(made.num_seeds, version)
            _forget_oldest(reads)
            _forget_oldest(by_position)
        return drawn

    @classmethod
    def forward_ended(cls) -> None:
        """Note the position of the stream after an outermost forward (See Rule 3)."""
        cls._latest_position = fingerprint()
        cls.has_latest_read = False

    def _again(
        self,
        draw: Callable[[], tuple[Drawn, ...]],
        name: str,
        version: int,
        hooks: object | None,
        is_open: bool,
    ) -> tuple[Drawn, ...]:
        known = [each for reads in list(self._by_hooks.values()) for each in reads.items()]
        if hooks is None or not known:
            if not is_open and not self._has_drawn:
                return draw()
            raise ReplayError(_unknown(name))
        position = fingerprint()
        here = [(drawn, reads[position]) for drawn, reads in known if position in reads]
        others = self._without_hooks if _is_in_function() else {}  # See Rule 4
        if len({drawn for drawn, _ in known} | others.keys()) > 1:
            if not here:
                raise ReplayError(_unknown(name))
            drawn_here = {drawn for drawn, _ in here}
            drawn_here |= {drawn for drawn, reads in others.items() if position in reads}
            if len(drawn_here) > 1 or not _is_restored(position, here, hooks):
                raise ReplayError(_ambiguous(name))
        versions = {read.version for _, read in here}
        if any(each != version for each in versions or _versions(known)):
            raise ChangedError(
                f"{name} was changed in place between forward and backward, and code that uses it "
                "is run again there. Step the optimizer after backward has passed every use of it."
            )
        if here:
            skip(here[0][1].num_seeds)
            return here[0][0]
        return known[0][0]  # the stream was not restored, and need not be


def _versions(known: list[tuple[tuple[Drawn, ...], dict[int, _Read]]]) -> set[int]:
    return {read.version for _, reads in known for read in reads.values()}


def _forget_oldest(records: dict[Any, Any]) -> None:
    if len(records) > _MAX_READS:
        del records[next(iter(records))]


def _hooks_in_force() -> Any:
    """Return an object that lives as long as the hooks in force can be asked; None without any."""
    pair = pair_in_force()
    if pair is None:
        return None
    holder: object = getattr(pair[0], "__self__", pair[1])  # a region, whose method the hook is
    kind: Any = type(holder)
    return holder if kind.__weakrefoffset__ else kind


def _is_in_function() -> bool:
    """Whether this runs in the backward of an autograd.Function (See Rule 5)."""
    node: Any = torch._C._current_autograd_node()
    is_of_hooks = type(node).__name__.startswith("BackwardHookFunction")
    return isinstance(node, torch.autograd.function.BackwardCFunction) and not is_of_hooks


def _is_restored(position: int, here: list[tuple[Any, _Read]], hooks: Any) -> bool:
    """Whether the stream was restored to this position (See Rule 3)."""
    restored = CheckpointedDraws._restored
    is_before = position != CheckpointedDraws._latest_position
    if is_before or any(read.num_seeds for _, read in here):
        if not isinstance(hooks, type):  # which stands for the hooks of other runs, too
            restored.add(hooks)
        return True
    return hooks in restored


def _unknown(name: str) -> str:
    return (
        f"{name} is read in a backward, by code that is run again there, and it cannot be told "
        "which draw it had in forward. Call torch.utils.checkpoint with use_reentrant=False and "
        "preserve_rng_state=True, or use recoup.checkpoint, which needs neither."
    )


def _ambiguous(name: str) -> str:
    return (
        f"{name} is read in a backward, by code that is run again there, and two forwards that "
        "gave it different draws stood at the same position of the random stream. Use "
        "recoup.checkpoint, run the backward of one before the other, or draw a number in between."
    )
