"""`recoup.tiled` and `recoup.tiled_loss`: calls that treat rows independently, in pieces.

NOTE [ Tiled calls ]

Rule 1. Each tile is a region of its own, so draws, autocast, comparisons, hooks and double
        backward are those of a checkpointed call. One tile is alive at a time. Of `tiled_loss` a
        tile runs forward and backward at once (See NOTE [ Gradients of a sum ]).
Rule 2. The result is that of `fn` for all rows: outputs are concatenated; losses are added, means
        weighted by the number of their targets.
Rule 3. A tile without a target has no loss (0 / 0 for most functions), so it is left out; without
        any target in any tile, all are taken as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from recoup._arguments import check_callable
from recoup._core.call import Call, run_again
from recoup._core.captured import captured_by
from recoup._core.compile import break_graph, is_followed, is_traced, is_watched, uncompiled
from recoup._core.rows import summed_loss
from recoup._core.saved_tensors import check_hooks_work
from recoup.regions.recompute import checkpoint_in_graph, name_of
from recoup.regions.tiles import (
    Cut,
    Reduction,
    Tiles,
    check_all_rows,
    check_few_rows,
    joined,
    tile_value,
)

P = ParamSpec("P")
T = TypeVar("T")
_NOT_IN_GRAPH = (
    "A loss in tiles runs outside of graphs: how many targets a tile has decides what runs. Leave "
    "out `fullgraph`, or call it outside of the compiled function."
)


def tiled(
    fn: Callable[P, T],
    dim: int = 1,
    tiles: int = 8,
    *,
    split: Sequence[int | str] | None = None,
    reduction: Reduction = "none",
    target: int | str | None = None,
    ignore_index: int = -100,
) -> Tiled[P, T]:
    """Return a callable that runs `fn`, which treats rows independently, on a piece at a time.

    Kept: the tensors in the arguments, and 5 KB of random state for each tile that draws. What `fn`
    makes between arguments and result is alive for one tile only, in forward and in backward.
    Backward pays one more run of `fn`, and some 100 microseconds a tile. The gradient of a
    weight is summed over the tiles, which takes three times its bytes for a moment. For a loss over
    a large vocabulary, `tiled_loss` spares both. A graph of torch.compile breaks at a loss in
    tiles; without `reduction`, tiles are torch's own checkpoints in it, and nothing is checked.

    The first call of a function, in each training mode, checks that it treats rows independently:
    `fn` runs on up to five rows, up to six times, and rows must come out the same beside others.
    Not seen: rows that are mixed only where there are more of them, only in backward, by less than
    rounding (a factor that begins at zero), or, if `fn` draws, what depends on their number or
    place; tensors of other classes than torch's; what a global is set to after the check.
    `.check(*args)` looks at all rows and gradients.
    A call that draws (dropout) draws tile by tile, so other numbers than `fn` would at once.

    Args:
        fn: a function or module for which ``fn(x)[:, i]`` depends on ``x[:, i]`` alone (with
            `dim` 1), such as an MLP. It may read what the function of `checkpoint` may.
        dim: the dimension of the rows: 1 for tokens of shape (N, L, D).
        tiles: how many pieces there are, as `chunks` of `torch.chunk`; each row is one if there
            are fewer rows. They differ by at most one row.
        split: the positions of arguments, and names of keyword arguments, that are split. By
            default those whose dimensions up to `dim` are those of the first tensor, wherever they
            are nested, except parameters; a size of 1 before `dim` counts as equal. Other arguments
            are given to each tile as they are.
        reduction: "none" concatenates the outputs. For a loss, "sum" or "mean" says which of the
            two `fn` returns; the result is that of `fn` for all rows.
        target: with "mean", the position or the name of the argument with the targets. By default
            the argument that has integers; without one, each row counts the same.
        ignore_index: the target that a mean does not count.

    Returns:
        A callable that takes the same arguments as `fn` and returns the same.
        ``.check(*args, **kwargs)`` raises an error if rows or gradients depend on other rows; it
        runs `fn` on all of them at once, so it is for a small batch.

    Raises:
        ValueError: when an argument is not one of these; in the call, when it is not clear which
            tensors are split, when outputs have no rows, or when `fn` mixes rows or changes a
            buffer (batch norm in training).
        ChangedError, ReplayError: as for `checkpoint`.

    Example:
        >>> import recoup, torch
        >>> mlp = torch.nn.Sequential(
        ...     torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)
        ... )
        >>> x = torch.ones(2, 100, 8, requires_grad=True)
        >>> y = recoup.tiled(mlp, dim=1, tiles=4)(x)
        >>> y.sum().backward()
        >>> y.shape, x.grad.shape
        (torch.Size([2, 100, 8]), torch.Size([2, 100, 8]))

    Source: Bekman et al., "Arctic Long Sequence Training", https://arxiv.org/abs/2506.13996.
    """
    return Tiled(fn, Cut(dim, tiles, split, reduction, target, ignore_index))


def tiled_loss(
    fn: Callable[P, Tensor],
    dim: int = 1,
    tiles: int = 8,
    *,
    split: Sequence[int | str] | None = None,
    reduction: Reduction = "mean",
    target: int | str | None = None,
    ignore_index: int = -100,
) -> TiledLoss[P]:
    """Return a callable that computes the loss `fn`, and its gradients, on a piece at a time.

    Kept: the gradients themselves, as large as the arguments and parameters that they belong to;
    what `fn` makes (the logits) is alive for one tile only. Each tile runs forward and backward in
    forward; backward only multiplies the gradients by that of the result. So nothing runs twice, as
    with `tiled(fn, reduction="mean")`, but gradients are paid for whenever grad mode is on, there
    is no double backward, and parameters' gradients are held from forward on. The weight of a
    linear layer takes the bytes of one gradient at any time, other weights, and all of them under
    autocast, up to three.

    What is checked is the same as for `tiled`. A graph of torch.compile breaks at it.

    Args:
        fn: a function or module that returns a loss, a tensor without dimensions, and treats rows
            independently: the head of a language model with its cross entropy.
        dim: the dimension of the rows: 1 for tokens of shape (N, L, D).
        tiles: how many pieces there are. Logits of all rows divided by `tiles` are alive, about
            three times (in forward and in backward of a cross entropy).
        split: the arguments that are split, as in `tiled`.
        reduction: "mean" or "sum": which of the two `fn` returns. A mean is over targets, each of
            the same weight: with class weights, let `fn` return a sum.
        target: with "mean", the argument with the targets, as in `tiled`.
        ignore_index: the target that a mean does not count; the one that `fn` ignores.

    Returns:
        A callable that takes the same arguments as `fn` and returns the same loss. The loss may be
        scaled, added to others, and reversed again with `retain_graph`.

    Raises:
        ValueError: as for `tiled`.
        GradientError: in forward, when `fn` uses a tensor that is not among its arguments and was
            computed before; in backward, with `create_graph=True`.

    Example:
        >>> import recoup, torch
        >>> head = torch.nn.Linear(8, 1000)
        >>> def head_and_loss(hidden, labels):
        ...     return torch.nn.functional.cross_entropy(
        ...         head(hidden).flatten(0, 1), labels.flatten()
        ...     )
        >>> hidden = torch.ones(2, 100, 8, requires_grad=True)
        >>> labels = torch.zeros(2, 100, dtype=torch.long)
        >>> loss = recoup.tiled_loss(head_and_loss, dim=1, tiles=10)(hidden, labels)
        >>> loss.backward()
        >>> hidden.grad.shape, head.weight.grad.shape
        (torch.Size([2, 100, 8]), torch.Size([1000, 8]))

    Source: Hsu et al., "Liger Kernel", https://arxiv.org/abs/2410.10989 (its fused linear cross
    entropy).
    """
    if reduction == "none":
        raise ValueError(
            '`reduction` is "none", but gradients can be taken in forward for a loss alone. Give '
            '"mean" or "sum", or use recoup.tiled.'
        )
    return TiledLoss(fn, Cut(dim, tiles, split, reduction, target, ignore_index))


class Tiled(Generic[P, T]):
    """A function that runs in tiles, as `tiled` returns it."""

    def __init__(self, fn: Callable[P, T], cut: Cut) -> None:
        check_callable(fn=fn)
        functools.update_wrapper(self, fn, updated=())
        self._fn: Callable[..., Any] = fn
        self._name, self._cut = name_of(fn), cut

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in tiles."""
        if is_traced():
            return self._fn(*args, **kwargs)
        if self._cut.reduction == "none" and is_followed():
            return self.run(args, kwargs)
        if is_followed():
            break_graph(_NOT_IN_GRAPH)
        run = cast("Any", Tiled).run
        return (uncompiled(run) if is_watched() else run)(self, args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Call the function in tiles, in a graph of the compiler or outside of any."""
        tiles = Tiles(args, kwargs, self._cut)
        if not is_followed():
            check_few_rows(self._name, self._fn, tiles)
        if self._cut.reduction != "none":
            return cast("T", self._loss(tiles))
        outputs = [self._tile(tiles, index, piece) for index, piece in _pieces(tiles)]
        return joined(outputs, tiles.sizes, tiles.dim, self._name)

    def __repr__(self) -> str:
        cut = self._cut
        return f"{type(self).__name__}({self._name}, dim={cut.dim}, tiles={cut.tiles})"

    def check(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Raise ValueError if the function does not treat rows independently, of all these.

        It compares the gradients of arguments and parameters, too. It runs the function on all rows
        at once, so it is for a small batch. `.grad` and the random state stay as they are.
        """
        check_all_rows(self._name, self._fn, Tiles(args, kwargs, self._cut))

    def _tile(self, tiles: Tiles, index: int, piece: Sequence[Tensor]) -> Any:
        args, kwargs = tiles.given(piece)
        if not torch.is_grad_enabled():
            return self._fn(*args, **kwargs)
        if is_followed():
            return checkpoint_in_graph(self._fn, *args, use_reentrant=False, **kwargs)
        return run_again(Call(f"tile {index} of {self._name}", self._fn, args, kwargs))

    def _loss(self, tiles: Tiles) -> Tensor:
        weights, divisor = tiles.weights()
        values: list[Tensor] = []
        for index, piece in _pieces(tiles):
            if weights[index]:  # See Rule 3
                output = self._tile(tiles, index, piece)
                value = tile_value(output, self._name, self._cut.reduction)
                values.append(value if divisor == 1 else value * (weights[index] / divisor))
        return functools.reduce(torch.add, values)


class TiledLoss(Tiled[P, Tensor]):
    """A loss that runs in tiles, as `tiled_loss` returns it."""

    def _loss(self, tiles: Tiles) -> Tensor:
        if not torch.is_grad_enabled():
            return super()._loss(tiles)
        check_hooks_work()

        def loss(piece: Sequence[Tensor]) -> Tensor:
            args, kwargs = tiles.given(piece)
            return tile_value(self._fn(*args, **kwargs), self._name, self._cut.reduction)

        outside = [t for t in (*captured_by(self._fn), *tiles.others) if isinstance(t, Tensor)]
        name, weights = f"the loss of {self._name} in tiles", tiles.weights()
        return summed_loss(name, loss, tiles.split, tiles.sizes, tiles.dim, *weights, outside)


def _pieces(tiles: Tiles) -> enumerate[tuple[Tensor, ...]]:
    """Return the tensors of each tile; in backward one node puts their gradients together."""
    if len(tiles.sizes) == 1:
        return enumerate([tuple(tiles.split)])
    split: list[Sequence[Tensor]] = [torch.split(t, tiles.sizes, tiles.dim) for t in tiles.split]
    return enumerate(zip(*split, strict=True))
