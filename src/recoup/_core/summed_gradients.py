"""A loss in pieces, whose gradients are taken one piece at a time while forward runs.

NOTE [ Gradients of a sum ]

Rule 1. The graph of a piece is freed before the next piece begins, and nobody else sees it: no pair
        of hooks is in force, and a region around keeps the sums alone.
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

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from recoup._core.saved_tensors import is_graph_retained, num_nodes, without_pairs
from recoup._core.settings import without_autocast
from recoup.errors import GradientError

# The places of the second matrix and the names of the first, by the node of a product.
_PRODUCTS = {"MmBackward0": (1, "_saved_self"), "AddmmBackward0": (2, "_saved_mat1")}
_Edge = tuple[Any, int]  # a node, and which of its outputs
_Users = dict[_Edge, list[tuple[Any, int]]]  # nodes, and which of their inputs it is


def summed_loss(
    name: str,
    loss: Callable[[list[Tensor]], Tensor],
    split: Sequence[Tensor],
    sizes: Sequence[int],
    dim: int,
    weights: Iterable[float],
    divisor: float,
    outside: Iterable[Tensor] = (),
    way_out: str = "Use recoup.tiled, which takes them in backward.",
) -> Tensor:
    """Return a weighted sum of losses of pieces, with its gradients.

    Kept: the gradients of leaves and of `split`, as large as these.

    Args:
        name: the name of the sum in error messages.
        loss: the loss of a piece, given its rows of each tensor in `split`.
        split: the tensors of which each piece has rows.
        sizes: the number of rows of each piece.
        dim: the dimension of the rows.
        weights: the factor of each loss; a piece of weight 0 does not run.
        divisor: the number by which the sum is divided in the end.
        outside: other tensors from before that losses may use, beside leaves.
        way_out: what an error for a second derivative advises.
    """
    sums = _Sums(name, outside)
    parts: list[Sequence[Tensor]] = [torch.split(t.detach(), list(sizes), dim) for t in split]
    pieces = zip(*parts, strict=True)
    start = 0
    for size, weight, piece in zip(sizes, weights, pieces, strict=True):
        if weight:
            asks = [tensor.requires_grad for tensor in split]
            own = [part.detach().requires_grad_(a) for part, a in zip(piece, asks, strict=True)]
            with without_pairs():  # See Rule 1
                found = sums.add(loss(own), weight, [each for each in own if each.requires_grad])
            for tensor, part in zip([t for t in split if t.requires_grad], found, strict=True):
                if part is not None:
                    sums.of(tensor).narrow(dim, start, size).copy_(part)
            del own, found
        start += size
    return sums.result(divisor, (f"the gradients of {name}", way_out))


class _Sums:
    """The sums of losses and of their gradients."""

    def __init__(self, name: str, outside: Iterable[Tensor]) -> None:
        self._name, self._start = name, num_nodes()
        self._outside = {(t.grad_fn, t.output_nr): t for t in outside if t.grad_fn is not None}
        self._values: list[Tensor] = []
        self._dtype = torch.float32
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}  # of each tensor, with the tensor

    def of(self, tensor: Tensor) -> Tensor:
        """Return the sum of the gradients of a tensor, to which parts are added."""
        if id(tensor) not in self._sums:
            self._sums[id(tensor)] = (tensor, torch.zeros_like(tensor.detach()))
        return self._sums[id(tensor)][1]

    def add(self, value: Tensor, weight: float, inputs: list[Tensor]) -> list[Tensor | None]:
        """Add ``weight * value``; return the gradients of `inputs`, which are its own leaves."""
        self._dtype = value.dtype
        wide = torch.promote_types(value.dtype, torch.float32)  # a sum may be too large for 16 bits
        self._values.append(value.detach().to(wide) * weight)
        if not value.requires_grad:
            return [None] * len(inputs)
        users, ends = self._graph_of(value)
        for each in inputs:
            ends.pop(get_gradient_edge(each)[:2], None)
        products = {edge: p for edge, end in ends.items() if (p := _product(edge, end, users))}
        others = [end for edge, end in ends.items() if edge not in products]
        asked: list[Any] = [*(GradientEdge(p[0], 0) for p in products.values()), *others, *inputs]
        with _without_hooks(others), without_autocast(value.device.type), torch.no_grad():
            seed = torch.full_like(value, weight)
            found: Any = torch.autograd.grad(value, asked, seed, allow_unused=True)
            found = list(found)
            for edge, (_, first, is_transposed) in products.items():
                part = found.pop(0)
                pair = (part.t(), first) if is_transposed else (first.t(), part)
                self.of(ends[edge]).addmm_(*pair)
                del part, pair
            for end in others:
                part = found.pop(0)
                if part is not None:
                    self.of(end).add_(part)
        return found

    def result(self, divisor: float, words: tuple[str, str]) -> Tensor:
        """Return the sum over `divisor`, with the summed gradients as its own."""
        pairs, self._sums = list(self._sums.values()), {}
        tensors = [total for _, total in pairs] + [tensor for tensor, _ in pairs]
        value = (torch.stack(self._values).sum() / divisor).to(self._dtype)
        return cast("Any", _Sum).apply(words, value, divisor, *tensors)

    def _graph_of(self, value: Tensor) -> tuple[_Users, dict[_Edge, Tensor]]:
        """Return who uses each output in the graph of a piece, and the tensors at its ends."""
        root: _Edge = get_gradient_edge(value)[:2]
        users: _Users = {root: []}
        ends: dict[_Edge, Tensor] = {}
        edges, seen = [root], set[Any]()
        for edge in edges:  # which grows
            end = self._end_at(*edge)
            if end is not None:
                ends[edge] = end
            elif edge[0] not in seen:
                seen.add(edge[0])
                for place, following in enumerate(edge[0].next_functions):
                    if following[0] is not None:
                        if following not in users:
                            users[following] = []
                            edges.append(following)
                        users[following].append((edge[0], place))
        return users, ends

    def _end_at(self, node: Any, number: int) -> Tensor | None:
        """Return the tensor at which gradients end, or None within the sum (See Rule 2)."""
        kind = type(node).__name__
        if kind == "AccumulateGrad":
            return node.variable
        if node._sequence_nr() >= self._start:
            return None
        if (node, number) in self._outside:
            return self._outside[node, number]
        if kind == "ToCopyBackward0" and hasattr(node.next_functions[0][0], "variable"):
            return None
        raise GradientError(
            f"{self._name} uses a tensor that was computed before ({kind[:-9]} made it) and "
            "requires a gradient, but is not among its arguments. Pass it as an argument, compute "
            "it within, or use recoup.tiled, which takes gradients in backward."
        )


def _product(edge: _Edge, weight: Tensor, users: _Users) -> tuple[Any, Tensor, bool] | None:
    """Return the only use of a weight if it is a product of matrices (See Rule 4).

    Returns:
        Its node, its first matrix, and whether the weight, its second, is transposed.
    """
    uses = users[edge]
    is_transposed = len(uses) == 1 and type(uses[0][0]).__name__ == "TBackward0"
    last = users[uses[0][0], 0] if is_transposed else uses
    if len(last) != 1 or weight.layout is not torch.strided or not weight.is_floating_point():
        return None
    node, place = last[0]
    at, name = _PRODUCTS.get(type(node).__name__, (-1, ""))
    first = getattr(node, name) if place == at and getattr(node, "_saved_alpha", 1) == 1 else None
    return None if first is None else (node, first, is_transposed)


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
            raise GradientError(
                f"{ctx.words[0]} were taken in forward, so they have no graph (`create_graph=True`)"
                f" and cannot be differentiated again. {ctx.words[1]}"
            )
        sums: tuple[Tensor, ...] = ctx.saved_tensors
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        factor = gradients[0].to(wide) / ctx.divisor
        scaled = torch.mul if is_graph_retained() else Tensor.mul_
        return (None, None, None, *[None] * len(sums), *[scaled(each, factor) for each in sums])
