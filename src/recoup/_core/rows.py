"""Functions of rows: the check that rows are independent, and a loss in pieces with its gradients.

NOTE [ Rows that do not know each other ]

Rule 1. Some rows are looked at, in two parts, a and b. The function runs on ab, and beside it on
        ab' and a'b, where a' and b' are other rows of the same call. The rows of a must come out as
        they do beside b', and those of b as beside a': to the bit, since shapes and random states
        are equal in these runs; where the function groups rows (experts), to rounding.
Rule 2. What is summed over rows (a loss, the gradient of a parameter) is a sum over a and b only if
        ab - ab' - a'b + a'b' is zero.
Rule 3. A function that does not draw runs on a and on b alone, too, which shows whether it knows
        the places or the number of rows. Kernels round otherwise for fewer rows, so this is coarse.
Rule 4. Nobody sees these runs: no pair of hooks, no dispatch mode and no cache of autocast. Random
        states are as before, and so are buffers and tensors that the function holds, by value: some
        kernels leave versions alone. That a buffer has changed is an error.

NOTE [ Gradients of a sum ]

Rule 5. The graph of a piece is freed before the next piece begins, and nobody else sees it: no pair
        of hooks is in force, and a region around keeps the sums alone.
Rule 6. Gradients are taken up to where the sum began: to leaves, and to tensors from before, which
        the numbers of their nodes tell. Copies that autocast made of a leaf are passed through.
Rule 7. A hook of a tensor is for its gradient, not for a part of it. Hooks wait for backward.
Rule 8. What a product of matrices adds to the gradient of a weight is added to the sum by the
        product itself. It is never there beside the sum, as large again.
Rule 9. Backward multiplies the sums by the gradient of the result, in their own memory where the
        graph is not retained. They are constants to autograd: a second derivative is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

from recoup._core.captured import captured_by, parts_of
from recoup._core.devices import generator_states, generators_restored, same_states
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import (
    grad_mode,
    is_graph_retained,
    num_nodes,
    versions_of,
    without_pairs,
)
from recoup._core.settings import without_autocast
from recoup._core.sketch import tolerance_of
from recoup._core.tensors import ends_of
from recoup.errors import ChangedError, GradientError

_COARSE = 16  # tolerances
Found = list[tuple[str, Tensor, bool]]  # names, values, and whether they are sums over rows


@dataclass
class RowCheck:
    """The check of a function, on the rows of one call."""

    fn: Callable[..., Any]  # whose buffers and tensors are put back
    split: Sequence[Tensor]  # the tensors that have the rows
    dim: int  # of the rows
    # Runs it on some rows, given their places and the tensors to take for those in `split`, by id,
    # and returns the rows of its outputs, or sums over rows.
    run: Callable[[Sequence[int], dict[int, Tensor]], Found]
    takes_gradients: bool = False  # whether gradients are compared, too
    draws: bool = False  # whether the function was seen to draw
    _leaves: list[Tensor] = field(default_factory=list[Tensor])

    def mixes(self, rows: Sequence[int]) -> str | None:
        """Return how the function does not treat these rows independently; "" if it does.

        None if the rows could not show that.
        """
        with without_pairs(), _disable_current_modes():  # See Rule 4
            return self._compared(rows)

    def _compared(self, rows: Sequence[int]) -> str | None:
        half, dim = len(rows) // 2, self.dim
        a, b = list(rows[:half]), list(rows[half:])
        other_a, other_b = b[:half], [*a, *a][: len(b)]
        if not a:
            return None
        with self._unseen() as changed:
            whole, other = (self._at(each).values() for each in (a + b, other_a + other_b))
            if all(map(torch.equal, whole, other)):
                return None
            pairs = (a, b), (a, other_b), (other_a, b), (other_a, other_b)
            runs = [self._found(first + second) for first, second in pairs]
            alone = [] if self.draws else [self._found(a), self._found(b)]
        if changed:
            return (
                f"it changes its buffer `{changed[0]}`, which tiles change once each. Leave that "
                "out of `fn`, or call `.eval()` on it."
            )
        is_telling = True
        for place, (name, value, is_sum) in enumerate(runs[0]):
            _, beside_b, beside_a, neither = (run[place][1] for run in runs)
            parts, allowed = [run[place][1] for run in alone], self._allowed(value)
            if is_sum:  # See Rule 2
                if not value.isfinite().all():
                    return None
                is_telling &= bool(value.any())
                exact = _COARSE * (allowed if value.dim() else tolerance_of(value.dtype))
                checks = [(exact, [value, neither], [beside_b, beside_a])]
            else:  # See Rule 1
                own = beside_b.narrow(dim, 0, half), beside_a.narrow(dim, half, len(b))
                checks = [(allowed, [value], [torch.cat(own, dim)])]
                parts = [torch.cat(parts, dim)] if parts else []
            if parts and (value.is_floating_point() or value.is_complex()):  # See Rule 3
                checks.append((_COARSE * allowed, [value], parts))
            for most, plus, minus in checks:
                error = _difference(plus, minus)
                if not error <= most:
                    of_loss = " A mean must be one over targets in all its parts." if is_sum else ""
                    return (
                        f"{name} differs by {error:.2g} of its size with other rows beside, where "
                        f"rounding explains {most:.2g}. Do not tile it, give another `dim`, say in "
                        "`split` which arguments have the rows, or call `.eval()` if it has norms "
                        f"over rows.{of_loss}"
                    )
        return "" if is_telling else None

    def _at(self, rows: Sequence[int]) -> dict[int, Tensor]:
        """Return the tensors with only some rows, in a graph of their own, by id."""
        found: dict[int, Tensor] = {}
        for each in self.split:
            part = each.detach().index_select(self.dim, torch.tensor(rows, device=each.device))
            asks = self.takes_gradients and (part.is_floating_point() or part.is_complex())
            found[id(each)] = part.requires_grad_(asks or each.requires_grad)
        return found

    def _found(self, rows: Sequence[int]) -> Found:
        """Return what the function makes of some rows, with gradients if they are asked for."""
        own, has_grad = self._at(rows), self.takes_gradients or torch.is_grad_enabled()
        with generators_restored() as before, grad_mode(has_grad):
            given = {key: leaf.clone() for key, leaf in own.items()}  # no leaves to the function
            differentiated = [each for each in given.values() if each.requires_grad]
            versions = versions_of(differentiated)
            found = self.run(rows, given)
            if has_grad and versions_of(differentiated) != versions:
                raise ChangedError(
                    "`fn` writes to an argument that is split, and tiles are views of it. Let it "
                    "write to a copy (`x.clone()`), or leave out `inplace=True`."
                )
            if self.takes_gradients:
                found += self._gradients(own, [each for each in found if each[1].requires_grad])
            self.draws |= not same_states(before.states, generator_states())
        return [(name, value.detach(), is_sum) for name, value, is_sum in found]

    def _gradients(self, own: dict[int, Tensor], found: Found) -> Found:
        """Return the gradients of some rows, and of leaves."""
        ends = [end for _, end, _ in found]
        asked = {id(each): each for each in own.values() if each.requires_grad}
        self._leaves = self._leaves or [t for t in ends_of(ends).leaves if id(t) not in asked]
        # The gradient that rows are given differs from row to row.
        given = [torch.ones_like(e) if is_sum else e.detach().sin() + 1.5 for _, e, is_sum in found]
        inputs, num = [*asked.values(), *self._leaves], len(asked)
        options = {"allow_unused": True, "materialize_grads": True}
        gradients = torch.autograd.grad(ends, inputs, given, **options) if ends else ()
        names = [f"argument {place}" for place in range(num)]
        names += [f"a parameter of shape {tuple(leaf.shape)}" for leaf in self._leaves]
        several = enumerate(zip(names, gradients, strict=False))
        return [(f"the gradient of {name}", each, place >= num) for place, (name, each) in several]

    @contextmanager
    def _unseen(self) -> Generator[list[str]]:
        """Return a context for runs (See Rule 4), and the names of buffers that they changed."""
        held: dict[int, tuple[str, Tensor]]
        held = {id(t): ("", t) for t in tensors_in(captured_by(self.fn))}
        held |= {id(pair[1]): pair for m in parts_of(self.fn)[1] for pair in m.named_buffers()}
        before = [
            (name, tensor, tensor.detach().clone())
            for name, tensor in held.values()
            if type(tensor) is Tensor and tensor.layout is torch.strided
            if not (tensor.requires_grad or tensor.is_quantized or tensor.is_meta)
        ]
        changed, has_cache = list[str](), torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield changed
        finally:
            torch.set_autocast_cache_enabled(has_cache)
            for name, tensor, values in before:
                if bool(((tensor != values) & (values == values)).any()):
                    tensor.detach().copy_(values)
                    changed += [name] if name else []

    def _allowed(self, value: Tensor) -> float:
        """Return what rounding explains, in the least exact type that `value` may be made in."""
        kind, modules = value.device.type, parts_of(self.fn)[1]
        dtypes = {value.dtype, *(p.dtype for module in modules for p in module.parameters())}
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        if kind != "cpu":  # a product of float32 may be of TF32
            dtypes.add(torch.float16)
        return max(map(tolerance_of, dtypes))


def few_of(rows: Sequence[int], size: int, num: int | None = None) -> list[int]:
    """Return a few rows, or `num`, spread: no more than a tile of `size` has, but for two."""
    few = 5 if size > 4 else 3 if size > 2 else 2  # odd: a shift by a power of two is seen
    num = min(few if num is None else num, len(rows))
    return [rows[i * (len(rows) - 1) // (num - 1)] for i in range(num) if num > 1]


def _difference(plus: Sequence[Tensor], minus: Sequence[Tensor]) -> float:
    """Return the length of the difference of two sums, over that of the longest summand."""
    is_pair = len(plus) == len(minus) == 1
    if not plus[0].numel() or (is_pair and torch.equal(plus[0], minus[0])):
        return 0.0
    terms = torch.stack([*map(_finite, plus), *(-_finite(each) for each in minus)])
    terms = terms / terms.abs().max().clamp_min(torch.finfo(terms.dtype).tiny)  # squares must fit
    longest, left = (each.square().sum(-1).max().sqrt() for each in (terms, terms.sum(0)))
    return float(left / longest) if longest else 0.0


def _finite(value: Tensor) -> Tensor:
    """Return the values in one dimension, in at least 32 bits, with numbers for nan and inf."""
    real = torch.view_as_real(value) if value.is_complex() else value
    wide = real.to(torch.promote_types(real.dtype, torch.float32))
    return wide.nan_to_num(nan=3.0, posinf=2.0, neginf=-2.0).flatten()


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
        sizes: the number of rows of each piece, in the dimension `dim`.
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
            with without_pairs():  # See Rule 5
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
        """Return the tensor at which gradients end, or None within the sum (See Rule 6)."""
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
    """Return the only use of a weight if it is a product of matrices (See Rule 8).

    That is its node, its first matrix, and whether the weight, its second, is transposed.
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
    """Return a context in which tensors have no hooks of their own (See Rule 7)."""
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
    """The node of the sum in the graph around it (See Rule 9)."""

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
