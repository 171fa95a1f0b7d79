"""Gradients of a sum whose summands are differentiated one by one, while forward runs.

NOTE [ Gradients of a sum ]

Rule 1. The graph of a summand is freed before the next summand begins, and nobody else sees it. So
        no pair of hooks is given what it saves, and a region around keeps the sums alone.
Rule 2. Gradients are taken up to where the sum began: to leaves, and to tensors from before, which
        the numbers of their nodes tell. Autocast may have copied a leaf before; copies save nothing
        and are passed through.
Rule 3. A hook of a tensor is for its gradient, not for a part of it. Hooks wait for backward.
Rule 4. What a product of matrices adds to the gradient of a weight is added to the sum by the
        product itself. It is never there beside the sum, as large again.
Rule 5. Backward multiplies the sums by the gradient of the result, in their own memory where the
        graph is not retained. The sums are constants to autograd, so a second derivative would be
        wrong, and is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from recoup._core.autocast_off import without_autocast
from recoup._core.restoring import Restoring
from recoup._core.saved_tensors import is_graph_retained, num_nodes, without_pairs
from recoup.errors import GradientError

__all__ = ["SummedGradients", "alone"]

# The places of the second matrix and the names of the first, by the node of a product.
_PRODUCTS = {"MmBackward0": (1, "_saved_self"), "AddmmBackward0": (2, "_saved_mat1")}
_COPY, _TRANSPOSED, _LEAF = "ToCopyBackward0", "TBackward0", "AccumulateGrad"


def alone() -> AbstractContextManager[object]:
    """Return a context for a summand: nobody else is given what it saves (See Rule 1)."""
    return without_pairs()


class SummedGradients:
    """The gradients of a sum, to which summands are added.

    Args:
        name: the name of the sum in error messages.
        outside: tensors from before that summands may use, beside leaves.
        way_out: what an error for a second derivative advises.
    """

    def __init__(
        self,
        name: str,
        outside: Iterable[Tensor],
        way_out: str = "Use recoup.tiled, which takes them in backward.",
    ) -> None:
        self._name, self._way_out = name, way_out
        self._start = num_nodes()
        self._values: list[Tensor] = []
        self._dtype = torch.float32
        self._outside = {(t.grad_fn, t.output_nr): t for t in outside if t.grad_fn is not None}
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}  # of each tensor, with the tensor
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}  # in place of tensors with a graph

    def add(self, value: Tensor, weight: float, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Add ``weight * value``; return the gradients of `inputs`, which are its own leaves."""
        self._dtype = value.dtype
        wide = torch.promote_types(value.dtype, torch.float32)  # a sum may be too large for 16 bits
        self._values.append(value.detach().to(wide) * weight)
        if not value.requires_grad:
            return [None] * len(inputs)
        graph = _Graph(self, value)
        own = set(map(id, inputs))
        products = [p for p in graph.products() if id(p.weight) not in own]
        added = own.union(id(product.weight) for product in products)
        ends = [tensor for key, tensor in graph.ends.items() if key not in added]
        edges = [GradientEdge(product.node, 0) for product in products]
        with _without_hooks(ends), without_autocast(value.device.type):
            gradients: Sequence[Any] = cast("Any", torch.autograd.grad)(
                value,
                [*inputs, *ends, *edges],
                torch.full_like(value, weight),
                allow_unused=True,
            )
        with torch.no_grad(), without_autocast(value.device.type):
            parts = gradients[len(inputs) :]
            for end, part in zip(ends, parts, strict=False):
                if part is not None:
                    self._sum_of(end).add_(part)
            for product, part in zip(products, parts[len(ends) :], strict=True):
                product.add_to(self._sum_of(product.weight), part)
        return list(gradients[: len(inputs)])

    def of(self, divisor: float, others: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the sum over `divisor`, with the summed gradients as its own.

        Args:
            divisor: the number by which the sum is divided.
            others: further tensors, each with its sum.
        """
        pairs = [*others, *self._sums.values()]
        self._sums = {}
        stand_for = {id(leaf): tensor for tensor, leaf in self._leaves.values()}
        tensors = [stand_for.get(id(tensor), tensor) for tensor, _ in pairs]
        sums = [total for _, total in pairs]
        total = (torch.stack(self._values).sum() / divisor).to(self._dtype)
        return cast("Any", _Sum).apply((self._name, self._way_out), total, divisor, *sums, *tensors)

    def as_end(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, or a leaf in its place if it has a graph, at which gradients end."""
        if tensor.grad_fn is None:
            return tensor
        if id(tensor) not in self._leaves:
            self._leaves[id(tensor)] = (tensor, tensor.detach().requires_grad_())
        return self._leaves[id(tensor)][1]

    def end_at(self, node: Any, number: int) -> Tensor | None:
        """Return the tensor at which gradients end, or None within the sum (See Rule 2)."""
        kind = type(node).__name__
        if kind == _LEAF:
            return node.variable
        if node._sequence_nr() >= self._start:
            return None
        if (node, number) in self._outside:
            return self._outside[node, number]
        if kind == _COPY and type(node.next_functions[0][0]).__name__ == _LEAF:
            return None
        raise GradientError(
            f"{self._name} uses a tensor that was computed before ({kind[:-9]} made it) and "
            "requires a gradient, but is not among its arguments. Pass it as an argument, compute "
            "it within, or use recoup.tiled, which takes gradients in backward."
        )

    def _sum_of(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._sums:
            self._sums[id(tensor)] = (tensor, torch.zeros_like(tensor.detach()))
        return self._sums[id(tensor)][1]


class _Product(NamedTuple):
    """A product of matrices whose second one is a weight, or its transpose (See Rule 4)."""

    node: Any
    first: Tensor
    weight: Tensor
    is_transposed: bool

    def add_to(self, total: Tensor, gradient: Tensor) -> None:
        if self.is_transposed:
            total.addmm_(gradient.t(), self.first)
        else:
            total.addmm_(self.first.t(), gradient)


class _Graph:
    """The graph of one summand.

    Attributes:
        ends: the tensors at which gradients end, by id.
    """

    def __init__(self, sums: SummedGradients, value: Tensor) -> None:
        self.ends: dict[int, Tensor] = {}
        self._uses: dict[int, list[tuple[Any, int]]] = {}
        self._users: dict[Any, list[tuple[Any, int]]] = {}  # of transposed matrices
        if value.grad_fn is None:
            self.ends[id(value)] = value
            return
        waiting: list[Any] = [value.grad_fn]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            for place, (following, number) in enumerate(node.next_functions):
                if following is None:
                    continue
                end = sums.end_at(following, number)
                if end is not None:
                    self.ends[id(end)] = end
                    self._uses.setdefault(id(end), []).append((node, place))
                    continue
                if type(following).__name__ == _TRANSPOSED:
                    self._users.setdefault(following, []).append((node, place))
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)

    def products(self) -> list[_Product]:
        """Return the products with weights that the graph uses nowhere else."""
        found: list[_Product] = []
        for key, uses in self._uses.items():
            weight, (node, place) = self.ends[key], uses[0]
            is_transposed = type(node).__name__ == _TRANSPOSED
            users = self._users.get(node, []) if is_transposed else uses
            if len(uses) != 1 or len(users) != 1:
                continue
            node, place = users[0]
            at, name = _PRODUCTS.get(type(node).__name__, (-1, ""))
            if place != at or getattr(node, "_saved_alpha", 1) != 1:
                continue
            first: Tensor | None = getattr(node, name)
            is_plain = weight.layout is torch.strided and weight.is_floating_point()
            if first is not None and is_plain:
                found.append(_Product(node, first, weight, is_transposed))
        return found


class _without_hooks(Restoring):  # noqa: N801 - as `without_pairs`
    """A context in which tensors have no hooks of their own (See Rule 3)."""

    __slots__ = ("_paused", "_tensors")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tensors
        self._paused: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def __enter__(self) -> None:
        for tensor in self._tensors:
            hooks: dict[int, Any] | None = getattr(tensor, "_backward_hooks", None)
            if hooks:
                self._paused.append((hooks, dict(hooks)))
                hooks.clear()

    def restore(self) -> None:
        while self._paused:
            hooks, entries = self._paused[-1]
            hooks.update(entries)
            self._paused.pop()


class _Sum(torch.autograd.Function):
    """The node of the sum in the graph around it (See Rule 5)."""

    @staticmethod
    def forward(
        ctx: Any, words: tuple[str, str], value: Tensor, divisor: float, *tensors: Tensor
    ) -> Tensor:
        ctx.words, ctx.divisor = words, divisor
        ctx.save_for_backward(*tensors[: len(tensors) // 2])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            name, way_out = ctx.words
            raise GradientError(
                f"The gradients of {name} were taken in forward, so they have no graph "
                f"(`create_graph=True`) and cannot be differentiated again. {way_out}"
            )
        sums: tuple[Tensor, ...] = ctx.saved_tensors
        (gradient,) = gradients
        factor = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / ctx.divisor
        if is_graph_retained():
            found: list[Tensor | None] = [sum_ * factor for sum_ in sums]
        else:
            found = [sum_.mul_(factor) for sum_ in sums]
        return (None, None, None, *[None] * len(sums), *found)
