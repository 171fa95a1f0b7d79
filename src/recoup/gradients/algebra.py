"""Sums, products and norms of whole stores."""

from __future__ import annotations

import math
from numbers import Real
from typing import Self, cast

import torch
from torch import Tensor

from recoup._arguments import check_flag, check_type
from recoup.errors import GradientError
from recoup.gradients.accumulation import are_finite, check_fits, dot, norm, scaled
from recoup.gradients.container import Container, number_in, weight_in


class Algebra(Container):
    """The vector operations of stores; absent gradients count as zero."""

    def extend_(
        self,
        *others: Container,
        weight: float = 1.0,
        alpha: float | None = None,
        consume: bool = True,
    ) -> Self:
        """Add other stores, in place: as more collected gradients, or as vectors.

        The weight of a store is the divisor that `mean_` uses. Merged stores add their weights, so
        that the mean is over all batches that they collected. Gradient surgery (``alpha=``)
        changes the direction of a gradient and collects nothing: it leaves the weight alone.

        Args:
            others: the stores to add; one that is named twice is added twice.
            weight: a factor for the gradients and the weights of the others, as in `backward`.
            alpha: if given, ``alpha * other`` is added as a vector, and the weight of this store
                stays as it is.
            consume: whether the others are emptied, each gradient as soon as it is added.

        Raises:
            GradientError: one was unscaled and another not, or a store is not usable.
            ValueError: shapes or placements differ, an argument is not a store, `weight` is not
                above zero, or `weight` and `alpha` are both given.

        Example:
            >>> import recoup, torch
            >>> p = torch.nn.Parameter(torch.zeros(2))
            >>> a = recoup.GradStore.from_backward(p.sum(), [p])
            >>> b = recoup.GradStore.from_backward(-p[0], [p])
            >>> a.extend_(b, alpha=0.5, consume=False)[p], a.weight  # surgery
            (tensor([0.5000, 1.0000]), 1.0)
            >>> a.extend_(b, weight=3)[p], a.weight  # three batches more
            (tensor([-2.5000,  1.0000]), 4.0)
        """
        self._check_is_whole()
        check_flag(consume=consume)
        factor, counted = _factors(weight, alpha)
        check_are_stores("others", *others)
        check_scales(self, *others)
        if self in others:  # before the others are added, or they would be multiplied too
            num_own = others.count(self)
            self.scale_(1 + factor * num_own)
            self.weight *= 1 + counted * num_own
        for other in dict.fromkeys(others):
            if other is not self:
                count = others.count(other)
                self._extend_by(other, factor * count, counted * count, consume=consume)
        return self

    def _extend_by(self, other: Container, factor: float, counted: float, *, consume: bool) -> None:
        gradients = other._gradients
        for each, gradient in gradients.items():
            check_fits(gradient, each)
        if gradients:
            self._scale = other._scale
        held = list(gradients)
        try:
            with self._guarded():
                for each in held:
                    gradient = gradients.pop(each) if consume else gradients[each]
                    self._add(each, gradient, factor, is_ours=consume)
        except BaseException as error:
            if len(gradients) < len(held):
                other._damage = f"{type(error).__name__}: {error}"
            raise
        self._is_local |= other._is_local
        self.weight += counted * other.weight
        self.params = self.params or other.params
        if consume:
            other.clear()

    merge_ = extend_

    def scale_(self, factor: float | Tensor) -> Self:
        """Multiply all gradients by a number; the weight stays, so that `mean_` is scaled too."""
        factor = _factor_in(factor, "factor")
        return self._map(lambda gradient: scaled(gradient, factor))

    def mean_(self) -> Self:
        """Divide the gradients by the sum of the weights, and set the weight to one.

        Raises:
            GradientError: the sum of the weights is not above zero.
        """
        if not self:
            return self
        if not self.weight > 0:
            raise GradientError(
                f"The gradients in the store have a total weight of {self.weight:g}, so they have "
                "no mean. Collect with `backward`, merge with `extend_` (`alpha` adds no weight), "
                "or divide with `scale_`."
            )
        if self.weight != 1:
            self.scale_(1 / self.weight)
        self.weight = 1.0
        return self

    def __add__(self, other: object) -> Self:
        return self.clone().__iadd__(other)

    def __radd__(self, other: object) -> Self:
        """Return a copy for the 0 that ``sum(stores)`` begins with."""
        if type(other) is not int or other != 0:
            return NotImplemented
        return self.clone()

    def __sub__(self, other: object) -> Self:
        return self.clone().__isub__(other)

    def __iadd__(self, other: object) -> Self:
        if not isinstance(other, Algebra):
            return NotImplemented
        return self.extend_(other, consume=False)

    def __isub__(self, other: object) -> Self:
        if not isinstance(other, Algebra):
            return NotImplemented
        return self.extend_(other, alpha=-1.0, consume=False)

    def __mul__(self, factor: float | Tensor) -> Self:
        return self.clone().__imul__(factor)

    __rmul__ = __mul__

    def __imul__(self, factor: float | Tensor) -> Self:
        if not isinstance(factor, Real | Tensor):
            return NotImplemented
        return self.scale_(factor)

    def __truediv__(self, divisor: float | Tensor) -> Self:
        return self * (1 / divisor)

    def __itruediv__(self, divisor: float | Tensor) -> Self:
        return self.scale_(1 / divisor)

    def __neg__(self) -> Self:
        return self * -1.0

    def dot(self, other: Algebra) -> Tensor:
        """Return the sum of products with another store; absent gradients count as zero.

        For complex gradients it is the real part, so that ``a.dot(a)`` is the square of the norm.
        """
        check_are_stores("other", other)
        return dot(self.coalesce_(), other.coalesce_())

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients together, as one vector.

        Like `dot`, it has a graph where gradients have one (``create_graph``): a penalty on it
        reaches the parameters.

        Raises:
            ValueError: `norm_type` is not above zero.
        """
        needed = "a number above zero: 2 for the Euclidean norm, math.inf for the largest entry"
        order = number_in(needed, lambda number: number > 0, norm_type=norm_type)
        return norm(self.coalesce_().values(), order)

    def cosine(self, other: Algebra) -> Tensor:
        """Return the cosine of the angle to another store, or zero if one of them is zero."""
        dot = self.dot(other)
        norms = self.norm().to(dot) * other.norm().to(dot)
        return dot / torch.where(norms == 0, torch.ones_like(norms), norms)

    def isfinite(self) -> Tensor:
        """Return whether all entries are finite, as a tensor."""
        self._check_is_whole()
        return are_finite(self.values())

    def clip_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`.

        Call it once, after merging: if batches are clipped one by one, later ones weigh more.

        Args:
            max_norm: the largest norm, at least 0.
            norm_type: order of the norm, above 0.
            error_if_nonfinite: whether to raise, before anything is changed, on a norm that is
                infinite or NaN; this waits for the device.

        Returns:
            The norm before scaling, as a tensor.

        Raises:
            GradientError: the norm is not finite, and `error_if_nonfinite` is True.
            ValueError: `max_norm` is not a number, or below 0; or `norm_type` is not above 0.
        """
        max_norm = number_in("a number of at least 0", lambda it: it >= 0, max_norm=max_norm)
        check_flag(error_if_nonfinite=error_if_nonfinite)
        total = self.norm(norm_type).detach()
        if error_if_nonfinite and not bool(total.isfinite()):
            raise GradientError(
                f"The norm of the gradients is {float(total)}. Skip this step, or pass "
                "error_if_nonfinite=False to scale them anyway."
            )
        self.scale_((max_norm / (total + 1e-6)).clamp(max=1.0))
        return total


# -- arguments -------------------------------------------------------------------------------------


def check_are_stores(argument: str, *given: object) -> None:
    """Raise unless all are stores, and usable."""
    for each in given:
        check_type(Container, "a GradStore", **{argument: each})
        cast("Container", each)._check_is_whole()


def check_scales(*stores: Container) -> None:
    """Raise if the gradients of stores do not have one scale."""
    holders = [store for store in stores if store._gradients]
    for store in holders[1:]:
        holders[0]._check_scale(store._scale, "Another store")


def _factors(weight: object, alpha: object) -> tuple[float, float]:
    """Return the factor of `extend_` for gradients, and its factor for weights."""
    counted = weight_in(weight)
    if alpha is None:
        return counted, counted
    if counted != 1:
        raise ValueError(
            f"`weight` is {weight!r} and `alpha` is {alpha!r}, but a store is either collected "
            "(give `weight`) or added as a vector (give `alpha`). Leave one of them out."
        )
    needed = "a single real number, finite, that scales all gradients that are added"
    return float(number_in(needed, math.isfinite, alpha=alpha)), 0.0


def _factor_in(given: object, argument: str) -> float | Tensor:
    """Return a factor for all gradients; a tensor stays one, so that nothing waits for it."""
    if isinstance(given, Tensor) and given.numel() == 1 and not given.is_complex():
        return given.reshape(())
    needed = (
        "a single real number, finite, that scales all gradients. To scale them one by one, change "
        "`store[param]` in place"
    )
    return number_in(needed, math.isfinite, **{argument: given})
