"""DistributedDataParallel: what its reducer sees of a store, and what it would miss."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recoup._arguments import shown
from recoup.errors import GradientError
from recoup.gradients.accumulation import is_sharded

if TYPE_CHECKING:
    from recoup.gradients.container import Container

__all__ = ["check_ddp", "is_reduced", "reduced_in_time"]


def check_ddp(ddp: Any) -> None:
    """Raise ValueError unless `ddp` is a DistributedDataParallel, False or None."""
    if ddp is None or ddp is False or hasattr(ddp, "require_backward_grad_sync"):
        return
    raise ValueError(
        f"`ddp` is {shown(ddp)}, but must be the DistributedDataParallel that reduces the "
        "gradients, or False if none does."
    )


def is_reduced(targets: Sequence[Tensor]) -> bool:
    """Whether a plain backward may reduce the gradients of `targets` over several processes."""
    distributed = torch.distributed
    return is_sharded(*targets) or (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


@contextmanager
def reduced_in_time(
    store: Container, targets: Sequence[Tensor], *, by_grad: bool = False
) -> Generator[None]:
    """Raise if a backward within would leave gradients of this process alone in a sum.

    A reducer takes over what is in `.grad`: the gradients of the store that fit there, also those
    collected within `no_sync`.

    Args:
        store: the store that the gradients are for.
        targets: the tensors whose gradients are collected.
        by_grad: whether `torch.autograd.grad` computes them, which no reducer sees.
    """
    if is_sharded(*targets) or not is_reduced(targets):
        yield
        return
    passes_by = by_grad or any(
        target in store._gradients and store._accumulator(target, target.grad_dtype) is None
        for target in targets
    )
    ddp: Any = store._ddp
    if passes_by and ddp is None:
        raise GradientError(
            "`ddp` is missing: there are several processes, and a reducer would not see these "
            'gradients (those of mode="grad"; sums that are sparse, or of another type or device '
            "than the parameters). Make the store with GradStore(params, ddp=model) for a "
            "DistributedDataParallel, or with ddp=False if nothing reduces them but `all_reduce_`."
        )
    syncs = bool(ddp) and ddp.require_backward_grad_sync
    if syncs and by_grad:
        raise GradientError(
            'Mode "grad" gives the gradients of this process alone, but the parameters belong '
            'to a DistributedDataParallel. Use mode="harvest"; or run forward and backward in its '
            "`no_sync()`, and call `all_reduce_` on the store."
        )
    if syncs and passes_by and store._gradients and store._is_local:
        raise GradientError(
            "The store holds gradients of this process alone, collected within `no_sync()`, and "
            "this backward would not reduce them too, since they are sparse or of another type or "
            "device than the parameters. Call `all_reduce_` first; or collect all within "
            "`no_sync()`, and call it at the end."
        )
    yield
    store._is_local = bool(ddp) and not syncs
