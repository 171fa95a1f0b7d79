"""`.grad` of tensors, replaced for a while by the gradients of a store.

The previous `.grad` and `grad_dtype` are restored afterwards, the same objects. All threads share
the `.grad` of a tensor, so it is replaced by one thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from recoup.errors import GradientError
from recoup.gradients.accumulation import Entries, is_alone, shared
from recoup.gradients.targets import described

__all__ = ["GradInUseError", "ReplacedGrad", "accumulating", "installed", "take_received"]


class GradInUseError(GradientError):
    """Another thread has replaced `.grad` of a tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__(
            f"Another thread is collecting the gradient of {described(target)}, and there is one "
            '`.grad` for all. Use mode="grad", or take turns.'
        )
        self.target = target


class ReplacedGrad:
    """`.grad` of some tensors, replaced for a while.

    Args:
        targets: the tensors, each once.
        gradients: `.grad` of each tensor meanwhile.
        dtypes: `grad_dtype` of each tensor meanwhile; None leaves it as it is.
    """

    _lock = threading.Lock()
    _active: list[ReplacedGrad] = []  # noqa: RUF012 - of all threads, and guarded by the lock

    def __init__(
        self,
        targets: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        dtypes: Sequence[torch.dtype | None],
    ) -> None:
        self._thread = threading.get_ident()
        self._ids: set[int] = set()
        self._before: list[tuple[Tensor, Tensor | None, torch.dtype | None]] = []
        self.targets = targets
        self.gradients = gradients
        self._dtypes = dtypes
        self._versions: list[int | None] = []

    @classmethod
    def in_use(cls, targets: Iterable[Tensor]) -> Tensor | None:
        """Return the first of the targets whose `.grad` another thread has replaced, if any."""
        with cls._lock:
            return cls._taken_by_others(threading.get_ident(), targets)

    @classmethod
    def _taken_by_others(cls, thread: int, targets: Iterable[Tensor]) -> Tensor | None:
        taken = [each._ids for each in cls._active if each._thread != thread]
        if not taken:
            return None
        return next((each for each in targets if any(id(each) in ids for ids in taken)), None)

    def __enter__(self) -> ReplacedGrad:
        self._versions = [None if each is None else _version_of(each) for each in self.gradients]
        self._record(self.targets)
        meanwhile = zip(self.targets, self.gradients, self._dtypes, strict=True)
        try:
            _set([(t, grad, dtype or t.grad_dtype) for t, grad, dtype in meanwhile])
        except BaseException:
            self.__exit__()
            raise
        return self

    def clear_others(self, others: Iterable[Tensor]) -> None:
        """Replace `.grad` of more tensors by None, too."""
        others = {id(each): each for each in others if id(each) not in self._ids}.values()
        self._record(others)
        for other in others:
            other.grad = None

    def _record(self, targets: Iterable[Tensor]) -> None:
        """Record `.grad` of the targets, and keep other threads from replacing it."""
        with self._lock:
            in_use = self._taken_by_others(self._thread, targets)
            if in_use is not None:
                raise GradInUseError(in_use)
            self._ids.update(map(id, targets))
            if self not in self._active:
                self._active.append(self)
        self._before += [(each, each.grad, each.grad_dtype) for each in targets]

    def __exit__(self, *error: object) -> None:
        _set(self._before)
        self._before = []
        with self._lock:
            if self in self._active:
                self._active.remove(self)

    def is_changed(self, index: int) -> bool:
        """Whether the gradient that was put into `.grad` of a target has changed in place."""
        gradient = self.gradients[index]
        return gradient is not None and _version_of(gradient) != self._versions[index]

    def take(self, index: int) -> Tensor | None:
        """Set `.grad` of a target to None, and return the gradient that it received, if any."""
        target = self.targets[index]
        gradient = target.grad
        if gradient is None or (gradient is self.gradients[index] and not self.is_changed(index)):
            return None
        target.grad = None
        return gradient


def _set(grads: Iterable[tuple[Tensor, Tensor | None, torch.dtype | None]]) -> None:
    """Set `.grad` and `grad_dtype` of tensors."""
    for target, gradient, dtype in grads:
        # Once set, `grad_dtype` no longer follows the type of the tensor, and cannot be unset.
        if target.grad_dtype is not dtype:
            target.grad = None
            target.grad_dtype = dtype
        if target.grad is not gradient:
            target.grad = gradient


def _version_of(gradient: Tensor) -> int:
    """Return how often `gradient` was changed in place; FSDP2 adds to its own part of it."""
    if type(gradient) is not Tensor:
        gradient = getattr(gradient, "_local_tensor", gradient)
    return gradient._version


# -- for a backward --------------------------------------------------------------------------------


@contextmanager
def accumulating(
    targets: Sequence[Tensor],
    entries: Entries,
    others: Iterable[Tensor] = (),
    *,
    is_plain: bool = False,
    elsewhere: Sequence[Tensor] = (),
) -> Generator[ReplacedGrad]:
    """Put the gradients of `entries` into `.grad` of the targets, and None into that of others.

    For those that are summed elsewhere, it is None, too.
    """
    excluded = set(map(id, elsewhere))
    gradients: list[Tensor | None] = [None] * len(targets)
    dtypes: list[torch.dtype | None] = [None] * len(targets)
    for index, target in enumerate(targets):
        if id(target) in excluded:
            continue
        # The buffers of a reducer have the type of the parameter.
        dtype = target.grad_dtype if is_plain else entries.dtype_of(target)
        dtypes[index] = None if is_plain else dtype
        if entries.gradients:
            gradients[index] = entries.accumulator(target, dtype)
    known = set(map(id, targets))
    others = list({id(each): each for each in others if id(each) not in known}.values())
    # A reducer may write to the tensor in `.grad` now, if that is a view of its buffer.
    values = [
        (each.grad, each.grad.clone())
        for each in ([*targets, *others] if is_plain else ())
        if each.grad is not None and not is_alone(each.grad)
    ]
    replaced = ReplacedGrad(
        [*targets, *others],
        gradients + [None] * len(others),
        dtypes + [None] * len(others),
    )
    try:
        with replaced:
            try:
                yield replaced
            except BaseException:
                entries.num_changes += sum(map(replaced.is_changed, range(len(targets))))
                raise
    finally:
        for gradient, before in values:
            gradient.copy_(before)


def take_received(
    replaced: ReplacedGrad,
    num_targets: int,
    entries: Entries,
    *,
    is_seen: bool = False,
    is_converted: bool = False,
) -> int:
    """Add the received gradients to `entries`, and return how many there are.

    Args:
        replaced: `.grad` of the targets, and of other tensors after those.
        num_targets: the number of targets.
        entries: the gradients of the store.
        is_seen: whether other code may hold references to the received gradients.
        is_converted: as in `Entries.add`.
    """
    num_received = 0
    for index in range(num_targets):
        gradient = replaced.take(index)
        if gradient is None:
            continue
        num_received += 1
        accumulator = replaced.gradients[index]
        if accumulator is None:
            gradient = shared(gradient) if is_seen else gradient
            entries.add(replaced.targets[index], gradient, is_converted=is_converted)
        elif gradient is not accumulator:
            entries.put(replaced.targets[index], gradient)
    return num_received


# -- for a step ------------------------------------------------------------------------------------


@contextmanager
def installed(
    gradients: Mapping[Tensor, Tensor],
    parameters: Sequence[Tensor],
    *,
    as_they_are: bool = False,
    with_zeros: bool = False,
) -> Generator[list[Tensor]]:
    """Set `.grad` of each parameter to its gradient, or to None where there is none.

    Args:
        gradients: the gradients to install; each is moved to the device of its parameter, cast to
            its `grad_dtype` (its own type if that is None), and laid out in its strides.
        parameters: all parameters whose `.grad` is set.
        as_they_are: install no copies, whatever the types, so that a change is seen outside.
        with_zeros: whether to install zeros where there is no gradient.

    Yields:
        A list that an error fills with the parameters whose gradient in `gradients` was changed in
        place. Kernels that do not change the version of a tensor are not seen: those that divide by
        the scale of a ``torch.amp.GradScaler``.
    """
    in_grad: list[Tensor | None] = []
    dtypes: list[torch.dtype | None] = [None] * len(parameters)
    copied: set[int] = set()
    for index, parameter in enumerate(parameters):
        gradient = gradients.get(parameter)
        if gradient is None:
            if with_zeros and parameter.requires_grad:
                gradient = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            in_grad.append(gradient)
            continue
        own = gradient.detach() if gradient.requires_grad else gradient
        fitting = own if as_they_are else _fitting(own, parameter)
        if fitting is own and own is not gradient:
            fitting = own.clone()  # the graph needs it, and two parameters may share it
        if fitting is not gradient:
            copied.add(index)
        in_grad.append(fitting)
        dtypes[index] = gradient.dtype if as_they_are else None
    changed: list[Tensor] = []
    with ReplacedGrad(parameters, in_grad, dtypes) as replaced:
        try:
            yield changed
        except BaseException:
            changed += [
                parameter
                for index, parameter in enumerate(parameters)
                if index not in copied and parameter in gradients and replaced.is_changed(index)
            ]
            raise


def _fitting(gradient: Tensor, target: Tensor) -> Tensor:
    """Return `gradient` on the device of `target`, and in its type and strides."""
    dtype = target.grad_dtype or target.dtype  # None allows any type, but not every optimizer does
    if gradient.dtype is not dtype or gradient.device != target.device:
        gradient = gradient.to(device=target.device, dtype=dtype)
    if gradient.is_sparse or gradient.stride() == target.stride():
        return gradient
    return torch.empty_like(target, dtype=dtype).copy_(gradient)
