"""Lending `.grad` of tensors to a store for a while.

The previous `.grad` and `grad_dtype` are restored afterwards, the same objects. All threads share
the `.grad` of a tensor, so it is lent to one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from recoup._core.restoring import Restoring
from recoup.errors import GradientError
from recoup.gradients.targets import said

__all__ = ["Lent", "LentElsewhereError"]


class LentElsewhereError(GradientError):
    """Another thread holds `.grad` of a tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__(
            f"Another thread is collecting the gradient of {said(target)}, and there is one "
            '`.grad` for all. Use mode="grad", or take turns.'
        )
        self.target = target


class Lent(Restoring):
    """`.grad` of some tensors, lent to a store for a while.

    Args:
        installed: `.grad` of each tensor meanwhile, and its type; a type of None leaves
            `grad_dtype` as it is.
    """

    _lock = threading.Lock()
    _holders: dict[int, list[Lent]] = {}  # noqa: RUF012 - of all threads, and guarded by the lock

    def __init__(self, installed: dict[Tensor, tuple[Tensor | None, torch.dtype | None]]) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._installed: dict[Tensor, tuple[Tensor | None, torch.dtype | None]] = {}
        self._wanted = installed
        self._before: list[tuple[Tensor, Tensor | None, torch.dtype | None]] = []
        self._versions: dict[Tensor, int] = {}

    @classmethod
    def is_lent_elsewhere(cls, target: Tensor) -> bool:
        """Whether another thread holds `.grad` of `target`."""
        with cls._lock:
            holders = cls._holders.get(id(target), [])
        return any(holder._thread != threading.get_ident() for holder in holders)

    def __enter__(self) -> Lent:
        self._install(self._wanted)
        return self

    def put_away(self, others: Iterable[Tensor]) -> None:
        """Set `.grad` of more tensors aside, too."""
        self._install(dict.fromkeys((o for o in others if o not in self._installed), (None, None)))

    def _install(self, more: dict[Tensor, tuple[Tensor | None, torch.dtype | None]]) -> None:
        with self._lock:
            for target in more:
                holders = self._holders.get(id(target), [])
                if any(holder._thread != self._thread for holder in holders):
                    raise LentElsewhereError(target)
            self._installed |= more
            for target in more:
                self._holders.setdefault(id(target), []).append(self)
        for target, (gradient, dtype) in more.items():
            self._before.append((target, target.grad, target.grad_dtype))
            target.grad = None
            # Once set, `grad_dtype` no longer follows the type of the tensor, and cannot be unset.
            if dtype is not None and target.grad_dtype is not dtype:
                target.grad_dtype = dtype
            target.grad = gradient
            if gradient is not None:
                self._versions[target] = _version_of(gradient)

    def restore(self) -> None:
        for target, gradient, dtype in reversed(self._before):
            target.grad = None
            if target.grad_dtype is not dtype:
                target.grad_dtype = dtype
            target.grad = gradient
        self._before = []
        with self._lock:
            for target in self._installed:
                holders = self._holders.get(id(target), [])
                if self in holders:
                    holders.remove(self)
                if not holders:
                    self._holders.pop(id(target), None)

    def changed(self) -> list[Tensor]:
        """Return the targets whose gradient in the store has been changed in place so far."""
        return [
            target
            for target, version in self._versions.items()
            if _version_of(cast("Tensor", self._installed[target][0])) != version
        ]

    def lost(self, *, is_plain: bool) -> list[Tensor]:
        """Return the targets whose gradient in the store was removed from `.grad`.

        With `is_plain`, a reducer may have moved it into a buffer of its own.
        """
        return [
            each
            for each, gradient in self.lent().items()
            if each.grad is None or (each.grad is not gradient and not is_plain)
        ]

    def lent(self) -> dict[Tensor, Tensor]:
        """Return the store's own gradients that were put into `.grad`."""
        return {each: cast("Tensor", self._installed[each][0]) for each in self._versions}

    def received(self) -> list[Tensor]:
        """Return the targets that have received a gradient."""
        changed = set(self.changed())
        return [
            target
            for target, (gradient, _) in self._installed.items()
            if target in changed or (target.grad is not None and target.grad is not gradient)
        ]

    def has_lent(self, target: Tensor) -> bool:
        """Whether the store's own gradient was in `.grad`."""
        return target in self._versions

    def take(self, target: Tensor) -> Tensor | None:
        """Set `.grad` of `target` to None, and return the gradient."""
        gradient, target.grad = target.grad, None
        return gradient


def _version_of(gradient: Tensor) -> int:
    """Return how often `gradient` was changed in place; FSDP2 adds to its own part of it."""
    return getattr(gradient, "_local_tensor", gradient)._version
