"""`recoup.tiled`: a call that treats rows independently, in pieces.

NOTE [ Tiled calls ]

Rule 1. Each tile is a region of its own, so draws, autocast, guards, hooks and double backward are
        those of a checkpointed call. One tile is alive at a time, in forward and in backward.
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
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from recoup._core.call import Call, run_again
from recoup._core.closures import ClosureGuard
from recoup._core.compile import break_graph, is_traced, is_watched, uncompiled
from recoup._core.compiled_graphs import is_followed
from recoup._core.saved_tensors import version_of
from recoup.regions.checkpoint import checkpoint_in_graph, name_of
from recoup.regions.tile_check import check_rows
from recoup.regions.tiles import Given, Reduction, Tiles, joined, tile_value

__all__ = ["Tiled", "check_arguments", "tiled"]

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
    Backward pays one more run of `fn`, and 100 to 200 microseconds a tile. The gradient of a
    weight is summed over the tiles, which takes three times its bytes for a moment. For a loss over
    a large vocabulary, `tiled_loss` spares both. A graph of torch.compile breaks at a loss in
    tiles; without `reduction`, tiles are torch's own checkpoints in it, and norms are not checked.

    It is checked that outputs have the rows of their tile, that no batch or instance norm is in
    training, and that no buffer changes; whether `fn` really treats rows independently is checked
    by `.check(*args)` alone. A call that draws (dropout) draws tile by tile, so other numbers than
    `fn` would at once.

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
        ``.check(*args, **kwargs)`` raises an error if `fn` gives other outputs or gradients in
        tiles than at once; it runs both, so it is for a small batch without dropout.

    Raises:
        ValueError: when an argument is not one of these; in the call, when it is not clear which
            tensors are split, when outputs have no rows, or when a norm is over rows.
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
    check_arguments(fn, dim, tiles, reduction)
    check_which(split, ignore_index)
    return Tiled(fn, dim, tiles, split, reduction, target, ignore_index)


class Tiled(Generic[P, T]):
    """A function that runs in tiles, as `tiled` returns it. Its arguments are those of `tiled`."""

    def __init__(
        self,
        fn: Callable[P, T],
        dim: int,
        tiles: int,
        split: Sequence[int | str] | None,
        reduction: Reduction,
        target: int | str | None,
        ignore_index: int,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn: Callable[..., Any] = fn
        self._name = name_of(fn)
        self._dim, self._tiles, self._split = dim, tiles, split
        self._reduction: Reduction = reduction
        self._target, self._ignore_index = target, ignore_index

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in tiles."""
        if is_traced():
            return self._fn(*args, **kwargs)
        if self._reduction == "none" and is_followed():
            return self.run(args, kwargs)
        if is_followed():
            break_graph(_NOT_IN_GRAPH)
        return (uncompiled(_run) if is_watched() else _run)(self, args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Call the function in tiles, in a graph of the compiler or outside of any."""
        if not is_followed():
            self._check_norms()
        tiles = Tiles(args, kwargs, self._dim, self._tiles, self._split)
        buffers = [] if is_followed() else self._buffers()
        if self._reduction == "none":
            outputs = [self._run(i, g) for i, g in self._pieces(tiles)]
            found = joined(outputs, tiles.sizes, tiles.dim, self._name)
        else:
            found = cast("T", self._loss(tiles))
        if len(tiles.sizes) > 1:
            self._check_buffers(buffers)
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}, dim={self._dim}, tiles={self._tiles})"

    def check(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Raise ValueError if the function gives other results in tiles than at once.

        It runs the function at once and in tiles, forward and backward, and compares the outputs
        and the gradients of the arguments and parameters. `.grad` and the random state stay as they
        are. A function that draws (dropout) differs in any case: check it in evaluation.
        """
        check_rows(self._name, self._fn, self, args, kwargs)

    def _pieces(self, tiles: Tiles) -> list[tuple[int, Given]]:
        return [(i, tiles.given(piece)) for i, piece in enumerate(tiles.pieces(tiles.tensors))]

    def _run(self, index: int, given: Given) -> Any:
        args, kwargs = given
        if not torch.is_grad_enabled():
            return self._fn(*args, **kwargs)
        if is_followed():
            return checkpoint_in_graph(self._fn, *args, use_reentrant=False, **kwargs)
        return run_again(Call(f"tile {index} of {self._name}", self._fn, args, kwargs))

    def _loss(self, tiles: Tiles) -> Tensor:
        weights, divisor = self._weights(tiles)
        values: list[Tensor] = []
        for index, given in self._pieces(tiles):
            if weights[index] != 0:  # See Rule 3
                value = tile_value(self._run(index, given), self._name, self._reduction)
                values.append(value if divisor == 1 else value * (weights[index] / divisor))
        return functools.reduce(torch.add, values)

    def _weights(self, tiles: Tiles) -> tuple[list[float], float]:
        """Return the weight of each tile, and what the sum is divided by."""
        if self._reduction == "mean" and len(tiles.sizes) > 1:
            return tiles.weights(self._target, self._ignore_index)
        return [1.0] * len(tiles.sizes), 1.0

    @property
    def _modules(self) -> Sequence[nn.Module]:
        return (self._fn,) if isinstance(self._fn, nn.Module) else ClosureGuard(self._fn).modules

    def _check_norms(self) -> None:
        for module in self._modules:
            for part in module.modules():
                if isinstance(part, _NormBase) and _is_over_rows(part):
                    raise ValueError(
                        f"`fn` ({self._name}) has a {type(part).__name__} that "
                        "computes statistics over rows, so it does not treat rows "
                        "independently. Leave it out of `fn`, or call `.eval()` on it."
                    )

    def _buffers(self) -> list[tuple[str, Tensor, int]]:
        found = [each for module in self._modules for each in module.named_buffers()]
        return [(name, buffer, version_of(buffer)) for name, buffer in found]

    def _check_buffers(self, before: Sequence[tuple[str, Tensor, int]]) -> None:
        for name, buffer, version in before:
            if version_of(buffer) != version:
                raise ValueError(
                    f"`fn` ({self._name}) changes its buffer `{name}`, which tiles change once "
                    "each, so it does not treat rows independently. Leave that out of `fn`, or "
                    "call `.eval()` on it."
                )


def _run(tiled: Tiled[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return tiled.run(args, kwargs)


def _is_over_rows(norm: _NormBase) -> bool:
    return norm.training or (isinstance(norm, _InstanceNorm) and not norm.track_running_stats)


def check_which(split: object, ignore_index: object) -> None:
    """Raise if `split` or `ignore_index` is not what it must be."""
    if split is not None and (isinstance(split, str) or not isinstance(split, Sequence)):
        raise ValueError(
            f"`split` is {split!r}, but must be a list of the positions of arguments and the names "
            "of keyword arguments, or None."
        )
    if type(ignore_index) is not int:
        raise ValueError(f"`ignore_index` is {ignore_index!r}, but must be an int.")


def check_arguments(fn: object, dim: object, tiles: object, reduction: object) -> None:
    """Raise if an argument of `tiled` or `tiled_loss` is not what it must be."""
    if not callable(fn):
        raise ValueError(f"`fn` is {fn!r}, but must be a function or module.")
    if type(dim) is not int:
        raise ValueError(f"`dim` is {dim!r}, but must be an int: the dimension of the rows.")
    if type(tiles) is not int or tiles < 1:
        raise ValueError(f"`tiles` is {tiles!r}, but must be an int of at least 1.")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f'`reduction` is {reduction!r}, but must be "none", "mean" or "sum".')
