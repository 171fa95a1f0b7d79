"""Gradients of a sum whose summands are differentiated one by one, while forward runs.

NOTE [ Gradients of a sum ]

Rule 1. The graph of a summand is freed before the next summand begins, and nobody else sees it. So
        callers make it `without_pairs`, and a region around keeps the sums alone.
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

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from recoup._core.autocast_off import without_autocast
from recoup._core.saved_tensors import is_graph_retained, num_nodes
from recoup.errors import GradientError

__all__ = ["SummedGradients"]

# The places of the second matrix and the names of the first, by the node of a product.
_PRODUCTS = {"MmBackward0": (1, "_saved_self"), "AddmmBackward0": (2, "_saved_mat1")}
_Edge = tuple[Any, int]  # a node, and which of its outputs
_Ends = dict[_Edge, Tensor]
_Users = dict[_Edge, list[tuple[Any, int]]]  # nodes, and which of their inputs it is
_COPY, _TRANSPOSED, _LEAF = "ToCopyBackward0", "TBackward0", "AccumulateGrad"


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

    def add(self, value: Tensor, weight: float, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Add ``weight * value``; return the gradients of `inputs`, which are its own leaves."""
        self._dtype = value.dtype
        wide = torch.promote_types(value.dtype, torch.float32)  # a sum may be too large for 16 bits
        self._values.append(value.detach().to(wide) * weight)
        if not value.requires_grad:
            return [None] * len(inputs)
        ends, users = self._ends_of(value)
        own = set(map(id, inputs))
        products = [p for p in _products(ends, users) if id(p.weight) not in own]
        own.update(id(product.weight) for product in products)
        others = [tensor for tensor in ends.values() if id(tensor) not in own]
        asked: list[Any] = [*inputs, *others, *(GradientEdge(p.node, 0) for p in products)]
        seed, device_type = torch.full_like(value, weight), value.device.type
        with _without_hooks(others), without_autocast(device_type):
            gradients: Any = torch.autograd.grad(value, asked, seed, allow_unused=True)
        parts = gradients[len(inputs) :]
        with torch.no_grad(), without_autocast(device_type):
            for end, part in zip(others, parts, strict=False):
                if part is not None:
                    self._sum_of(end).add_(part)
            for product, part in zip(products, parts[len(others) :], strict=True):
                pair = (
                    (part.t(), product.first)
                    if product.is_transposed
                    else (product.first.t(), part)
                )
                self._sum_of(product.weight).addmm_(*pair)
        return list(gradients[: len(inputs)])

    def of(self, divisor: float, others: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the sum over `divisor`, with the summed gradients as its own.

        Args:
            divisor: the number by which the sum is divided.
            others: further tensors, each with its sum.
        """
        pairs = [*others, *self._sums.values()]
        self._sums = {}
        both = [total for _, total in pairs] + [tensor for tensor, _ in pairs]
        value = (torch.stack(self._values).sum() / divisor).to(self._dtype)
        return cast("Any", _Sum).apply((self._name, self._way_out), value, divisor, *both)

    def _ends_of(self, value: Tensor) -> tuple[_Ends, _Users]:
        """Return the tensors at which the gradients of a summand end, and who uses each output."""
        ends: _Ends = {}
        users: _Users = {}
        if value.grad_fn is None:
            return {(None, 0): value}, {(None, 0): []}
        waiting: list[Any] = [value.grad_fn]
        seen = set(waiting)
        for node in waiting:  # which grows
            for place, edge in enumerate(node.next_functions):
                if edge[0] is None:
                    continue
                users.setdefault(edge, []).append((node, place))
                end = self._end_at(*edge) if edge not in ends else ends[edge]
                if end is not None:
                    ends[edge] = end
                elif edge[0] not in seen:
                    seen.add(edge[0])
                    waiting.append(edge[0])
        return ends, users

    def _end_at(self, node: Any, number: int) -> Tensor | None:
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


def _products(ends: _Ends, users: _Users) -> list[_Product]:
    """Return the products with weights that the graph uses nowhere else."""
    found: list[_Product] = []
    for edge, weight in ends.items():
        uses = users[edge]
        is_transposed = len(uses) == 1 and type(uses[0][0]).__name__ == _TRANSPOSED
        last = users[uses[0][0], 0] if is_transposed else uses
        if len(uses) != 1 or len(last) != 1:
            continue
        node, place = last[0]
        at, name = _PRODUCTS.get(type(node).__name__, (-1, ""))
        is_plain = weight.layout is torch.strided and weight.is_floating_point()
        if place != at or not is_plain or getattr(node, "_saved_alpha", 1) != 1:
            continue
        first: Tensor | None = getattr(node, name)
        if first is not None:
            found.append(_Product(node, first, weight, is_transposed))
    return found


@contextmanager
def _without_hooks(tensors: Iterable[Tensor]) -> Generator[None]:
    """Return a context in which tensors have no hooks of their own (See Rule 3)."""
    hooks: list[dict[int, Any]] = [getattr(each, "_backward_hooks", None) or {} for each in tensors]
    before = list(map(dict[int, Any], hooks))
    try:
        for each in hooks:
            each.clear()
        yield
    finally:
        for each, entries in zip(hooks, before, strict=True):
            each.update(entries)


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
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        factor = gradients[0].to(wide) / ctx.divisor
        scaled = torch.mul if is_graph_retained() else Tensor.mul_
        found = [scaled(each, factor) for each in sums]
        return (None, None, None, *[None] * len(sums), *found)
