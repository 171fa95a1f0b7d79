"""Sums, products and norms of whole stores."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from recoup.errors import GradientError
from recoup.gradients import arithmetic
from recoup.gradients.container import Container
from recoup.gradients.merging import scaled

__all__ = ["Algebra"]


class Algebra(Container):
    """What can be done with gradients as with vectors; what is absent is zero."""

    def extend_(self, *others: Container, alpha: float = 1.0, consume: bool = True) -> Self:
        """Add other stores, in place.

        Args:
            others: what to add.
            alpha: a factor for them.
            consume: whether they are emptied, each gradient as soon as it is added.

        Raises:
            GradientError: one was unscaled and another not, or a store is not usable.
            ValueError: shapes or placements differ.
        """
        self._check_is_whole()
        for other in others:
            other._check_is_whole()
            if other._entries.gradients:
                self._check_scale(other._scale, "The other store")
        for other in others:
            if other is self:
                self._map(lambda gradient: scaled(gradient, 1 + alpha))
                self.weight *= 1 + alpha
                continue
            if other._entries.gradients:
                self._scale = other._scale
            with self._guarded():
                for each in list(other):
                    gradient = other._entries.gradients[each]
                    if consume:
                        other._entries.gradients.pop(each)
                    self._entries.add(each, gradient, alpha, is_ours=consume)
            self.weight += alpha * other.weight
            self.params = self.params or other.params
            if consume:
                other.clear()
        return self

    merge_ = extend_

    def scale_(self, factor: float | Tensor) -> Self:
        """Multiply all gradients by a number."""
        return self._map(lambda gradient: scaled(gradient, factor))

    def mean_(self) -> Self:
        """Divide by the sum of the weights, which is one afterwards.

        Raises:
            GradientError: nothing that was collected had a weight.
        """
        if not self:
            return self
        if not self.weight > 0:
            raise GradientError(
                f"The weights of what the store holds sum to {self.weight:g}. Collect with "
                "`backward(loss, weight=...)`, or divide with `scale_`."
            )
        if self.weight != 1:
            self.scale_(1 / self.weight)
        self.weight = 1.0
        return self

    def __add__(self, other: Algebra) -> Self:
        return self.clone().extend_(other, consume=False)

    def __sub__(self, other: Algebra) -> Self:
        return self.clone().extend_(other, alpha=-1.0, consume=False)

    def __iadd__(self, other: Algebra) -> Self:
        return self.extend_(other, consume=False)

    def __isub__(self, other: Algebra) -> Self:
        return self.extend_(other, alpha=-1.0, consume=False)

    def __mul__(self, factor: float | Tensor) -> Self:
        return self.clone().scale_(factor)

    __rmul__ = __mul__

    def __imul__(self, factor: float | Tensor) -> Self:
        return self.scale_(factor)

    def __truediv__(self, divisor: float | Tensor) -> Self:
        return self * (1 / divisor)

    def __neg__(self) -> Self:
        return self * -1.0

    def dot(self, other: Algebra) -> Tensor:
        """Return the sum of products with another store, what is absent being zero.

        Of complex gradients it is the real part, so that ``a.dot(a)`` is the square of the norm.
        """
        self._check_is_whole()
        other._check_is_whole()
        return arithmetic.dot(self.coalesce_(), other.coalesce_())

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients together, as one vector."""
        return arithmetic.norm(self.coalesce_().values(), float(norm_type))

    def cosine(self, other: Algebra) -> Tensor:
        """Return the cosine of the angle to another store; zero if one of them is zero."""
        dot = self.dot(other)
        norms = self.norm().to(dot) * other.norm().to(dot)
        return torch.where(norms > 0, dot / norms, torch.zeros_like(dot))

    def isfinite(self) -> Tensor:
        """Return whether no entry is infinite or NaN."""
        self._check_is_whole()
        return arithmetic.are_finite(self.values())

    def clip_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`.

        Call it once, when everything is merged: clipped one by one, later batches weigh more.

        Args:
            max_norm: the largest norm.
            norm_type: order of the norm.
            error_if_nonfinite: whether to raise, before anything is changed, on a norm that is
                infinite or NaN; this waits for the device.

        Returns:
            The norm before, as a tensor.

        Raises:
            GradientError: the norm is not finite, and that is an error.
        """
        total = self.norm(norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise GradientError(
                f"The norm is {float(total)}. Say error_if_nonfinite=False to scale all the same, "
                "or skip this step."
            )
        self.scale_((max_norm / (total + 1e-6)).clamp(max=1.0))
        return total

    def clip_value_(self, clip_value: float) -> Self:
        """Clip each entry to ``[-clip_value, clip_value]``."""

        def clipped(gradient: Tensor) -> Tensor:
            if gradient.is_sparse:
                gradient._values().clamp_(-clip_value, clip_value)
                return gradient
            if gradient.requires_grad:
                return gradient.clamp(-clip_value, clip_value)
            return gradient.clamp_(-clip_value, clip_value)

        return self.coalesce_()._map(clipped)
