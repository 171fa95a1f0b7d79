"""`.grad` of tensors, replaced for a while.

The previous `.grad` and `grad_dtype` are restored afterwards, the same objects. All threads share
the `.grad` of a tensor, so it is replaced by one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from recoup.errors import GradientError
from recoup.gradients.accumulation import owned
from recoup.gradients.targets import described


class GradInUseError(GradientError):
    """Another thread has replaced `.grad` of a tensor."""

    def __init__(self, target: Tensor) -> None:
        self.reason = f"another thread is collecting the gradient of {described(target)}"
        super().__init__(
            f"{self.reason.capitalize()}, and there is one `.grad` for all. Use "
            'mode="grad", or take turns.'
        )


class ReplacedGrad:
    """A context in which `.grad` of some tensors is replaced.

    Args:
        targets: the tensors, each once.
        gradients: `.grad` of each tensor meanwhile.
        dtypes: `grad_dtype` of each tensor meanwhile; None leaves it as it is.
        storages: as for `handed_over`.
    """

    _lock = threading.Lock()
    _threads: dict[int, int] = {}  # noqa: RUF012 - who has replaced what, guarded by the lock

    def __init__(
        self,
        targets: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        dtypes: Sequence[torch.dtype | None],
        storages: set[int] | None = None,
    ) -> None:
        self.targets = targets
        self.gradients = gradients
        self._dtypes = dtypes
        self._storages = storages
        self.is_converted = False  # whether `dtypes` are those that gradients are summed in
        # FSDP2 adds to its own part of a gradient.
        self._parts = [getattr(each, "_local_tensor", each) for each in gradients]
        self._versions = [None if each is None else each._version for each in self._parts]
        self._ids: list[int] = []  # of tensors that no other context of this thread has replaced
        self._before: list[tuple[Tensor, Tensor | None, torch.dtype | None]] = []

    def __enter__(self) -> ReplacedGrad:
        self._record(self.targets)
        meanwhile = zip(self.targets, self.gradients, self._dtypes, strict=True)
        try:
            _set([(t, grad, dtype or t.grad_dtype) for t, grad, dtype in meanwhile])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        _set(self._before)
        with self._lock:
            for each in self._ids:
                del self._threads[each]

    def hide(self, others: Iterable[Tensor]) -> None:
        """Replace `.grad` of more tensors by None."""
        known = {id(target) for target, _, _ in self._before}
        others = {id(each): each for each in others if id(each) not in known}.values()
        self._record(others)
        for other in others:
            other.grad = None

    def _record(self, targets: Iterable[Tensor]) -> None:
        """Record `.grad` of the targets, and keep other threads from replacing it."""
        here = threading.get_ident()
        with self._lock:
            for each in targets:
                if self._threads.get(id(each), here) != here:
                    raise GradInUseError(each)
            free = [id(each) for each in targets if id(each) not in self._threads]
            self._threads.update(dict.fromkeys(free, here))
            self._ids += free
        self._before += [(each, each.grad, each.grad_dtype) for each in targets]

    def is_changed(self, index: int) -> bool:
        """Whether the gradient that was put into `.grad` of a target has changed in place."""
        part = self._parts[index]
        return part is not None and part._version != self._versions[index]

    def take(self, index: int) -> Tensor | None:
        """Set `.grad` of a target to None, and return the gradient that it received, if any.

        It belongs to the caller (See `handed_over`).
        """
        target, lent = self.targets[index], self.gradients[index]
        gradient = target.grad
        if gradient is None or (gradient is lent and not self.is_changed(index)):
            return None
        target.grad = None
        return gradient if gradient is lent else handed_over(gradient, self._storages)


def handed_over(gradient: Tensor, storages: set[int] | None) -> Tensor:
    """Return a gradient that autograd left in `.grad`, or a copy if others may have its memory.

    Args:
        gradient: the gradient.
        storages: what others have; the memory of `gradient` is added. None if a reducer may have
            everything.
    """
    if storages is not None and not gradient.is_sparse:  # whose indices may be those of a batch
        storage = gradient.untyped_storage()._cdata
        if storage not in storages:
            storages.add(storage)
            return owned(gradient)
    return gradient.clone()


def _set(grads: Iterable[tuple[Tensor, Tensor | None, torch.dtype | None]]) -> None:
    """Set `.grad` and `grad_dtype` of tensors."""
    for target, gradient, dtype in grads:
        # Once set, `grad_dtype` no longer follows the type of the tensor, and cannot be unset.
        if target.grad_dtype is not dtype:
            target.grad = None
            target.grad_dtype = dtype
        if target.grad is not gradient:
            target.grad = gradient
