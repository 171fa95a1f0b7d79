"""DistributedDataParallel's reducers, and checks for gradients that they would miss."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recoup.errors import GradientError
from recoup.gradients.accumulation import Entries

__all__ = ["check_is_not_reduced", "is_distributed", "reduced_in_time"]


def is_distributed() -> bool:
    """Whether there are several processes."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def check_is_not_reduced(targets: Iterable[Tensor]) -> None:
    """Raise if a DistributedDataParallel would not reduce what `torch.autograd.grad` returns."""
    if any(each.require_backward_grad_sync for each in _reducers_of(targets)):
        raise GradientError(
            'Mode "grad" gives the gradients of this process alone, but the parameters belong '
            'to a DistributedDataParallel. Use mode="harvest"; or run forward and backward in its '
            "`no_sync()`, and call `all_reduce_` on the store."
        )


_known_reducers: weakref.WeakSet[Any] = weakref.WeakSet()


def _reducers_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the DistributedDataParallel objects that reduce gradients of these tensors.

    Parameters do not refer to them, but each refers to its class, so the garbage collector finds
    them all. It looks through all objects for that, unless those found before have all the tensors.
    """
    if not is_distributed():
        return []
    wanted = {id(each) for each in tensors if each.is_leaf}
    found, missing = _among_known(wanted)
    if missing:
        from torch.nn.parallel import DistributedDataParallel

        kinds = [DistributedDataParallel]
        for kind in kinds:
            kinds += kind.__subclasses__()
        _known_reducers.update(each for each in gc.get_referrers(*kinds) if type(each) in kinds)
        found, _ = _among_known(wanted)
    return found


def _among_known(wanted: set[int]) -> tuple[list[Any], set[int]]:
    """Return the known reducers of the tensors with these ids, and the ids that none has."""
    found: list[Any] = []
    missing = wanted
    for each in list(_known_reducers):
        own = set(map(id, each.parameters()))
        if not wanted.isdisjoint(own):
            found.append(each)
            missing = missing - own
    return found, missing


@contextmanager
def reduced_in_time(targets: Sequence[Tensor], entries: Entries) -> Generator[None]:
    """Raise if a backward within would be reduced but the store's gradients never would be.

    Gradients collected within `no_sync` reach a reducer through `.grad`, if they fit there.
    """
    if not is_distributed():
        yield
        return
    if not any(target in entries.gradients for target in targets):
        entries.are_local = False
    may_be_lost = entries.are_local and not _fit(targets, entries)
    if may_be_lost and any(each.require_backward_grad_sync for each in _reducers_of(targets)):
        raise GradientError(
            "The store holds gradients of this process alone, collected within `no_sync()`, and "
            "this backward would not reduce them too, since they are sparse or of another type or "
            "device than the parameters. Call `all_reduce_` first; or collect all within "
            "`no_sync()`, and call it at the end."
        )
    yield
    if not entries.are_local and not _fit(targets, entries):
        reducers = _reducers_of(targets)
        entries.are_local = any(not each.require_backward_grad_sync for each in reducers)


def _fit(targets: Iterable[Tensor], entries: Entries) -> bool:
    """Whether a reducer would take the store's gradients of `targets` from `.grad`."""
    return all(
        target not in entries.gradients
        or entries.accumulator(target, target.grad_dtype) is not None
        for target in targets
        if target.is_leaf
    )
