"""Clocks: what tells the step of a schedule where forwards are not what should be counted.

NOTE [ The count lives with the optimizer ]

Rule 1. The steps of an optimizer are counted in its first group of parameters, which every
        optimizer saves and loads as it is. So a schedule goes on where a checkpoint of the
        optimizer was made, and two models that have the same optimizer see the same count.
Rule 2. A step that a GradScaler skips is none. It does not call most optimizers then; a fused one
        is called, and told by `found_inf` to do nothing.
Rule 3. A clock is not copied: a copy of a model reads the same one. It does not keep an optimizer
        or a scheduler alive, nor the memory of its state; without it, the last count stays.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Clock", "Counter"]

Clock = Optimizer | LRScheduler | Callable[[], int]
_KEY = "num_steps"
_counted: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Counter:
    """Reads the step off a clock.

    Args:
        clock: an optimizer, a learning-rate scheduler, or a function without arguments.

    Attributes:
        place: where its count is, in errors.

    Raises:
        ValueError: when `clock` is none of these, or returns something else than an int from 0.
    """

    def __init__(self, clock: Clock) -> None:
        given: Any = clock
        self._owner: Callable[[], Any] = lambda: given
        self._count: Callable[[Any], Any]
        if isinstance(given, Optimizer):
            optimizer = _innermost(given)
            _count_steps_of(optimizer)
            self._owner, self._count = weakref.ref(optimizer), _steps_of
            self.place = f'`param_groups[0]["{_KEY}"]` of the {type(optimizer).__name__}'
        elif isinstance(given, LRScheduler) and hasattr(given, "last_epoch"):
            self._owner, self._count = weakref.ref(given), operator.attrgetter("last_epoch")
            self.place = f"`last_epoch` of the {type(given).__name__}"
        elif callable(given) and not isinstance(given, (type, LRScheduler, Tensor)):
            self._count = operator.call
            self.place = f"what {getattr(given, '__name__', type(given).__name__)} returns"
        else:
            raise ValueError(
                f"`clock` is {given!r}, but must be an optimizer, a learning-rate scheduler with a "
                "`last_epoch`, or a function without arguments that returns an int."
            )
        self.read(0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Counter:
        return self  # See Rule 3

    def read(self, last: int) -> int:
        """Return the step; `last` if the clock is gone."""
        owner = self._owner()
        if owner is None:
            return last
        count = self._count(owner)
        try:
            step = -1 if isinstance(count, (bool, Tensor)) else operator.index(count)
        except TypeError:
            step = -1
        if step < 0:
            raise ValueError(f"The step is {self.place}: {count!r}, but must be an int from 0.")
        return step


def _innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that a wrapper (of a trainer) passes its calls on to."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _steps_of(optimizer: Optimizer) -> Any:
    return optimizer.param_groups[0].get(_KEY, 0)  # a state that was saved without it has none


def _count_steps_of(optimizer: Optimizer) -> None:
    optimizer.param_groups[0].setdefault(_KEY, 0)
    if optimizer not in _counted:
        _counted.add(optimizer)
        optimizer.register_step_post_hook(_count)


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    found_inf = cast("Tensor | None", getattr(optimizer, "found_inf", None))
    if found_inf is None or not found_inf.item():  # See Rule 2
        group = optimizer.param_groups[0]
        group[_KEY] = group.get(_KEY, 0) + 1
