"""Owned gradients by their targets, with the type and the device that each is summed in."""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.gradients.merging import check_fits, merged
from recoup.gradients.ownership import owned
from recoup.gradients.targets import said

__all__ = ["Entries"]

_LOW = (torch.float16, torch.bfloat16)


class Entries:
    """The gradients of a store (See Rule 1 of `merging`).

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
        if self.dtype is not None:
            return self.dtype.to_complex() if target.is_complex() else self.dtype
        chosen = target.grad_dtype if target.is_leaf else None
        if chosen is not None and chosen is not target.dtype:
            return chosen
        return torch.float32 if target.dtype in _LOW else target.dtype

    def is_elsewhere(self, target: Tensor) -> bool:
        """Whether the gradient of `target` is summed on another device."""
        return self.device is not None and self.device != target.device

    def lendable(self, target: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """Return the gradient of `target` if autograd may sum into it, in that type.

        To a sparse one, autograd would only append entries (See Rule 3 of `merging`).
        """
        gradient = self.gradients.get(target)
        if gradient is None or gradient.requires_grad or gradient.is_sparse:
            return None
        fits = gradient.device == target.device and gradient.shape == target.shape
        fits = fits and gradient.dtype is dtype
        return gradient if fits else None

    def add(
        self, target: Tensor, gradient: Tensor, alpha: float = 1.0, *, is_ours: bool = True
    ) -> None:
        """Add ``alpha * gradient`` to the gradient of `target`.

        Args:
            target: the tensor that the gradient belongs to.
            gradient: a gradient; nothing is changed if it does not fit.
            alpha: a factor.
            is_ours: whether the caller hands it over, and holds the only reference to it.
        """
        check_fits(gradient, target, said(target))
        into = self.gradients.get(target)
        if into is not None and into.shape != gradient.shape:
            raise ValueError(
                f"The store holds a gradient of shape {tuple(into.shape)} of what is "
                f"{said(target)} now. Drop it (`discard`) when a tensor is resized."
            )
        self.num_changes += 1
        if into is None or into.is_sparse:
            placed = self._placed(target, gradient)
            is_ours |= placed is not gradient
            gradient = placed
            del placed
            gradient = owned(gradient) if is_ours else gradient.clone()
        elif gradient.device != into.device or gradient.is_sparse:
            gradient = gradient.to(device=into.device, dtype=into.dtype)
        self.gradients[target] = merged(into, gradient, alpha)

    def put(self, target: Tensor, gradient: Tensor) -> None:
        """Replace the gradient of `target` by `gradient`, which the caller hands over."""
        self.num_changes += 1
        self.gradients[target] = owned(self._placed(target, gradient))

    def _placed(self, target: Tensor, gradient: Tensor) -> Tensor:
        device = target.device if self.device is None else self.device
        return gradient.to(device=device, dtype=self.dtype_of(target))
