"""The gradients of a store: it owns them, and sums them in place, whatever their layouts.

NOTE [ Owned gradients ]

Rule 1. A gradient in a store belongs to it alone, so sums are made in place. A tensor from
        elsewhere is adopted only if no other tensor uses its memory, and copied otherwise.
Rule 2. A gradient with a graph (`create_graph`) is never changed in place: the graph needs it.
Rule 3. Sums of sparse gradients list entries twice, and grow with each. They are coalesced when
        they list more than half as many entries as there are rows. They stay sparse, however
        many rows they cover: SparseAdam takes no others, and the layout must not depend on data.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup.gradients.targets import described

__all__ = [
    "Entries",
    "as_dense",
    "check_fits",
    "coalesced",
    "is_alone",
    "is_sharded",
    "owned",
    "scaled",
    "shared",
]

_LOW = (torch.float16, torch.bfloat16)
_LAYOUTS = (torch.strided, torch.sparse_coo)
_PLAIN: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
_CUDA_GRAPHS = "torch._inductor.cudagraph_trees"
_num_uses: Callable[[int], int] = cast("Any", torch._C)._storage_Use_Count


class Entries:
    """The gradients of a store by target, with the type and the device that they are summed in.

    Args:
        dtype: the type that gradients are summed in; None for the type of each target, and float32
            for one of 16 bits.
        device: the device that they are summed on; None for the device of each target.
    """

    def __init__(self, dtype: torch.dtype | None, device: torch.device | None) -> None:
        self.gradients: dict[Tensor, Tensor] = {}
        self.dtype = dtype
        self.device = device
        self.num_changes = 0
        self.are_local = False  # parts of a sum over processes that no reducer has seen

    def dtype_of(self, target: Tensor) -> torch.dtype:
        """Return the type that the gradient of `target` is summed in."""
        own = target.dtype
        if self.dtype is not None:
            return self.dtype.to_complex() if own.is_complex else self.dtype
        chosen = target.grad_dtype if target.is_leaf else None
        if chosen is not None and chosen is not own:
            return chosen
        return torch.float32 if own in _LOW else own

    def elsewhere(self, targets: Iterable[Tensor]) -> list[Tensor]:
        """Return the targets whose gradients are summed on another device."""
        if self.device is None:
            return []
        return [target for target in targets if target.device != self.device]

    def accumulator(self, target: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """Return the gradient of `target` if autograd may sum into it, in that type.

        To a sparse one, autograd would only append entries (See Rule 3).
        """
        gradient = self.gradients.get(target)
        if gradient is None or gradient.requires_grad or gradient.is_sparse:
            return None
        fits = gradient.dtype is dtype and gradient.device == target.device
        return gradient if fits and gradient.shape == target.shape else None

    def add(
        self,
        target: Tensor,
        gradient: Tensor,
        alpha: float = 1.0,
        *,
        is_ours: bool = True,
        is_converted: bool = False,
    ) -> None:
        """Add ``alpha * gradient`` to the gradient of `target`.

        Args:
            target: the tensor that the gradient belongs to.
            gradient: a gradient; nothing is changed if it does not fit.
            alpha: a factor.
            is_ours: whether the caller hands it over, and holds the only reference to it.
            is_converted: whether autograd has delivered it to `target`, in the type and on the
                device that it is summed in.
        """
        if not (is_converted and type(gradient) is Tensor and gradient.layout is torch.strided):
            check_fits(gradient, target)
        into = self.gradients.get(target)
        if into is not None and into.shape != gradient.shape:
            raise ValueError(
                f"The store holds a gradient of shape {tuple(into.shape)} of what is "
                f"{described(target)} now. Drop it (`discard`) when a tensor is resized."
            )
        self.num_changes += 1
        if into is None or into.is_sparse:
            converted = gradient if is_converted else self._converted(target, gradient)
            is_ours |= converted is not gradient
            gradient = owned(converted) if is_ours else converted.clone()
            del converted
        elif gradient.device != into.device or gradient.is_sparse:
            gradient = gradient.to(device=into.device, dtype=into.dtype)
        self.gradients[target] = _sum(into, gradient, alpha)

    def put(self, target: Tensor, gradient: Tensor) -> None:
        """Replace the gradient of `target` by `gradient`, which the caller hands over."""
        self.num_changes += 1
        self.gradients[target] = owned(self._converted(target, gradient))

    def _converted(self, target: Tensor, gradient: Tensor) -> Tensor:
        device = target.device if self.device is None else self.device
        dtype = self.dtype_of(target)
        if gradient.dtype is dtype and gradient.device == device:
            return gradient
        return gradient.to(device=device, dtype=dtype)


def check_fits(gradient: Tensor, target: Tensor) -> None:
    """Raise if `gradient` cannot be a gradient of `target`."""
    if gradient.shape != target.shape:
        name = described(target)
        raise ValueError(
            f"The gradient of {name} has shape {tuple(gradient.shape)}, and {name} has "
            f"{tuple(target.shape)}. Give one of the same shape."
        )
    if gradient.layout not in _LAYOUTS:
        raise ValueError(
            f"The gradient of {described(target)} has the layout {gradient.layout}, which cannot "
            "be summed in place. Give a dense one, or a sparse one in COO layout."
        )
    if gradient.is_meta and not target.is_meta:
        raise ValueError(
            f"The gradient of {described(target)} is on the meta device, where it has no values. "
            f"Give one on {target.device}."
        )
    if type(gradient) not in _PLAIN or type(target) not in _PLAIN:
        _check_placements(gradient, target)
    if gradient.dtype.is_complex and not target.dtype.is_complex:
        name = described(target)
        raise ValueError(f"The gradient of {name} is complex, and {name} is real. Give a real one.")


def _check_placements(gradient: Tensor, target: Tensor) -> None:
    name, kinds = described(target), ("a plain tensor", "a DTensor")
    if is_sharded(gradient) != is_sharded(target):
        raise ValueError(
            f"The gradient of {name} is {kinds[is_sharded(gradient)]} and {name} is "
            f"{kinds[is_sharded(target)]}. A mixture would drop a sum over the processes in "
            "silence: give both as they are in the model."
        )
    placements = [getattr(each, "placements", None) for each in (gradient, target)]
    if placements[0] != placements[1]:
        raise ValueError(
            f"The gradient of {name} is placed as {placements[0]} and {name} as {placements[1]}. "
            "Redistribute it first."
        )


def is_sharded(*tensors: Tensor) -> bool:
    """Whether one of the tensors is a DTensor, one part of which is in this process."""
    return any(hasattr(each, "placements") for each in tensors if type(each) not in _PLAIN)


# -- sums ------------------------------------------------------------------------------------------


def _sum(into: Tensor | None, gradient: Tensor, alpha: float) -> Tensor:
    """Return ``into + alpha * gradient``, in place where possible (See Rules 1 and 2).

    Args:
        into: an owned gradient, or None for zero.
        gradient: an owned gradient if `into` is None or sparse; it may be changed, then.
        alpha: a factor.
    """
    if into is None:
        return gradient if alpha == 1 else scaled(gradient, alpha)
    if into.requires_grad or gradient.requires_grad:
        if into.is_sparse and not gradient.is_sparse:  # torch adds the sparse one to the dense one
            return torch.add(gradient if alpha == 1 else gradient * alpha, into)
        return torch.add(into, gradient, alpha=alpha)
    if not into.is_sparse:
        return into.add_(gradient, alpha=alpha)
    if not gradient.is_sparse:
        return scaled(gradient, alpha).add_(into)
    total = torch.add(into, gradient, alpha=alpha)
    num_rows = math.prod(total.shape[: total.sparse_dim()])
    return coalesced(total) if total._nnz() > num_rows / 2 else total  # See Rule 3


def scaled(gradient: Tensor, factor: float | Tensor) -> Tensor:
    """Return an owned gradient times a number, in place where possible."""
    if gradient.requires_grad:
        return gradient * factor
    values = gradient._values() if gradient.is_sparse else gradient
    values.mul_(factor.to(values.device) if isinstance(factor, Tensor) else factor)
    return gradient


def as_dense(gradient: Tensor) -> Tensor:
    """Return a dense gradient."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def coalesced(gradient: Tensor) -> Tensor:
    """Return a sparse gradient with each entry listed once, in no more memory than that takes."""
    return owned(gradient.coalesce())  # torch's result is a piece of the larger memory


# -- ownership -------------------------------------------------------------------------------------


def owned(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a copy if its memory is shared or is a piece of a larger one.

    A gradient from autograd may be the gradient of another tensor too, a tensor that the caller
    gave (or, if sparse, have its indices), one number expanded, a piece of the gradient of a
    concatenation, or a buffer that a reducer or a captured graph writes to again.

    Other references to the object `tensor` cannot be seen: the caller must hold the only one.
    """
    return tensor if is_alone(tensor) else tensor.clone()


def shared(tensor: Tensor) -> Tensor:
    """Return another tensor with the memory of `tensor`, to which other code may hold references.

    If it does, `owned` sees that the memory is shared after the caller has dropped `tensor`. The
    memory of a sparse tensor would not show it, so a sparse tensor is copied.
    """
    return tensor.clone() if tensor.layout is torch.sparse_coo else tensor.detach()


def is_alone(tensor: Tensor, num_others: int = 0) -> bool:
    """Whether only `tensor`, and as many known others, use its memory, and it covers all of it."""
    if tensor.is_sparse:
        # Each of these is a second view of the memory of the sparse tensor.
        return is_alone(tensor._indices(), 1) and is_alone(tensor._values(), 1)
    if type(tensor) not in _PLAIN:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    storage, num_bytes = tensor.untyped_storage(), tensor.nbytes
    if storage.nbytes() != num_bytes:
        return False  # an empty part of FSDP2 is a piece of its buffer, too
    return num_bytes == 0 or (
        _num_uses(storage._cdata) == 2 + num_others  # `tensor`, and the object `storage`
        # One number expanded may come from a buffer that is just as large.
        and (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor))
        and not (tensor.is_cuda and _CUDA_GRAPHS in sys.modules)
    )
