"""The tiles of a call: its arguments in pieces, and its result from theirs.

NOTE [ What is split ]

Rule 1. The first tensor that is split has the rows. Another one is split if it has as many at `dim`
        and the dimensions before it agree, where 1 agrees with any. So labels (N, L) are split with
        values (N, L, D), and a mask (N, 1, L, L) is not. Parameters are not split unless named.
Rule 2. A tensor that has as many by chance must not be split, and one that is not split must not
        be meant to be: where the dimensions before `dim` do not agree, it is an error not to say.
Rule 3. Tiles differ by at most one row. There are fewer where there are fewer rows, and one where
        there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from recoup._core.pytree import Tree, flatten, flatten_arguments, flatten_containers

__all__ = ["Given", "Reduction", "Tiles", "joined", "tile_value"]

Given = tuple[tuple[Any, ...], dict[str, Any]]
Reduction = Literal["none", "mean", "sum"]


class Tiles:
    """The arguments of one call, and which of their tensors are split.

    Args:
        args: the arguments.
        kwargs: the keyword arguments.
        dim: the dimension of the rows.
        tiles: how many tiles there are at most.
        split: the positions and names of the arguments that are split; None to find them.

    Attributes:
        tensors: the tensors among the arguments.
        is_split: whether each of them is split.
        dim: the dimension of the rows, not negative.
        sizes: how many rows each tile has.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dim: int,
        tiles: int,
        split: Sequence[int | str] | None,
    ) -> None:
        self._args, self._kwargs = args, kwargs
        self.tensors, self._tree = flatten_arguments(args, kwargs)
        named = None if split is None else self._ids_of(split)
        rows = next((t for t in self.tensors if _may_have_rows(t, named)), None)
        if rows is None:
            raise ValueError(
                f"`split` is {split!r}, and no argument that it allows is a tensor. Pass the "
                "tensor with the rows as an argument, and name it in `split` if it is a parameter."
            )
        if not -rows.dim() <= dim < rows.dim():
            raise ValueError(
                f"`dim` is {dim}, but the first tensor among the arguments that are split has "
                f"shape {tuple(rows.shape)}. Give the dimension of its rows."
            )
        self.dim = dim % rows.dim()
        num_rows = rows.shape[self.dim]
        if named is None:
            self.is_split = [_has_rows(t, rows, self.dim) for t in self.tensors]
        else:
            self.is_split = [id(t) in named for t in self.tensors]
            self._check_named(num_rows)
        num_tiles = max(1, min(tiles, num_rows))  # See Rule 3
        size, more = divmod(num_rows, num_tiles)
        self.sizes = [size + (place < more) for place in range(num_tiles)]

    def pieces(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the tensors of each tile.

        Args:
            tensors: the tensors of the whole call, or others in their places.
        """
        columns: list[Sequence[Tensor]] = [
            # In backward one node puts the gradients of all pieces together.
            t.split(self.sizes, self.dim) if split else [t] * len(self.sizes)
            for t, split in zip(tensors, self.is_split, strict=True)
        ]
        return list(zip(*columns, strict=True))

    def given(self, tensors: tuple[Tensor, ...]) -> Given:
        """Return the arguments with `tensors` in the places of theirs."""
        given: Any = self._tree.unflatten(tensors)
        return (given, {}) if self._tree.is_flat else given

    def weights(self, target: int | str | None, ignore_index: int) -> tuple[list[float], float]:
        """Return the weight of each tile in a mean, and their sum.

        Args:
            target: the argument with the targets; None for the one that has integers, if any.
            ignore_index: the target that does not count.
        """
        targets = self._targets(target)
        if targets is None:
            return list(map(float, self.sizes)), float(sum(self.sizes))
        parts = cast("Sequence[Tensor]", targets.split(self.sizes, self.dim))
        each = torch.stack([(part != ignore_index).sum() for part in parts])
        counts = cast("list[int]", each.tolist())
        # Without any target it is what `fn` makes of none: nan for most.
        weights = list(map(float, counts if any(counts) else self.sizes))
        return weights, sum(weights)

    def _targets(self, target: int | str | None) -> Tensor | None:
        split = [t for t, is_split in zip(self.tensors, self.is_split, strict=True) if is_split]
        if target is not None:
            ids = self._ids_of([target])
            split = [t for t in split if id(t) in ids]
        whole = [t for t in split if not t.dtype.is_floating_point and t.dtype != torch.bool]
        if target is not None and len(whole) != 1:
            raise ValueError(
                f"`target` is {target!r}, but that argument has {len(whole)} tensors of integers "
                "that are split. Name the argument that is the tensor of targets."
            )
        if len(whole) > 1:
            raise ValueError(
                f"{len(whole)} arguments are tensors of integers, of shapes "
                f"{[tuple(t.shape) for t in whole]}, and `target` does not say which has the "
                "targets that a mean counts. Give its position or its name."
            )
        return whole[0] if whole else None

    def _ids_of(self, names: Sequence[int | str]) -> set[int]:
        found: set[int] = set()
        for name in names:
            try:
                value = self._args[name] if isinstance(name, int) else self._kwargs[name]
            except (IndexError, KeyError):
                raise ValueError(
                    f"`split` or `target` names {name!r}, but the call has {len(self._args)} "
                    f"positional arguments and the keywords {list(self._kwargs)}. Give positions "
                    "of positional arguments, and names of keyword arguments."
                ) from None
            found.update(map(id, flatten_containers(value)[0]))
        return found

    def _check_named(self, num_rows: int) -> None:
        for tensor, is_split in zip(self.tensors, self.is_split, strict=True):
            if is_split and (tensor.dim() <= self.dim or tensor.shape[self.dim] != num_rows):
                raise ValueError(
                    f"`split` names an argument of shape {tuple(tensor.shape)}, but dimension "
                    f"{self.dim} must have {num_rows} rows, as the first one has. Leave it out, "
                    "or give it as many."
                )


def _may_have_rows(tensor: Tensor, named: set[int] | None) -> bool:
    return not isinstance(tensor, nn.Parameter) if named is None else id(tensor) in named


def _has_rows(tensor: Tensor, rows: Tensor, dim: int) -> bool:
    if tensor.dim() <= dim or isinstance(tensor, nn.Parameter):
        return False
    if tensor.shape[dim] != rows.shape[dim] or rows.shape[dim] == 1:
        return tensor is rows
    before = zip(tensor.shape[:dim], rows.shape[:dim], strict=True)
    if all(a == b or 1 in (a, b) for a, b in before):
        if not _may_be_of_features(tensor, rows):
            return True
        raise ValueError(  # See Rule 2
            f"An argument has shape {tuple(tensor.shape)} beside the first one, of shape "
            f"{tuple(rows.shape)}: it may have a value a row, or one a feature. `split` must say "
            "which arguments are split: give their positions and names."
        )
    raise ValueError(  # See Rule 2
        f"An argument has shape {tuple(tensor.shape)}, so as many entries in dimension {dim} as "
        f"the first one, of shape {tuple(rows.shape)}, but other dimensions before it. `split` "
        "must say which arguments are split: give their positions and names."
    )


def _may_be_of_features(tensor: Tensor, rows: Tensor) -> bool:
    """Whether a tensor of numbers would also be broadcast along the last dimensions of `rows`."""
    if not tensor.is_floating_point() or tensor.dim() >= rows.dim():
        return False
    last = zip(reversed(tensor.shape), reversed(rows.shape), strict=False)
    return all(a in (b, 1) for a, b in last)


def joined(outputs: list[Any], sizes: Sequence[int], dim: int, name: str) -> Any:
    """Return the outputs of tiles as one: their tensors concatenated, all else as it is.

    Args:
        outputs: what `fn` returned for each tile.
        sizes: how many rows each tile has.
        dim: the dimension of the rows.
        name: the name of `fn` in error messages.
    """
    tree: Tree | None = None
    columns: list[tuple[Tensor, ...]] = []
    for output, size in zip(outputs, sizes, strict=True):
        tensors, own = flatten(output)
        if tree is not None and not tree.matches(own):
            raise ValueError(
                f"`fn` ({name}) returned values of another structure, or other values that are not "
                "tensors, for another tile. It must return the same for each; return a number as "
                "a tensor with an entry a row."
            )
        tree = own
        for tensor in tensors:
            if tensor.dim() <= dim or tensor.shape[dim] != size:
                raise ValueError(
                    f"`fn` ({name}) returned a tensor of shape {tuple(tensor.shape)} for a tile of "
                    f"{size} rows, so it does not treat rows independently: dimension {dim} of all "
                    "that it returns must have as many. Return one entry a row; for a loss, give "
                    '`reduction="mean"` or "sum".'
                )
        columns.append(tensors)
    if tree is None or len(outputs) == 1:
        return outputs[0]
    return tree.unflatten(tuple(torch.cat(parts, dim) for parts in zip(*columns, strict=True)))


def tile_value(output: Any, name: str, reduction: Reduction) -> Tensor:
    """Return the loss of a tile; raise if it is none.

    Args:
        output: what `fn` returned.
        name: the name of `fn` in error messages.
        reduction: how losses of tiles become one.
    """
    if isinstance(output, Tensor) and output.dim() == 0 and output.is_floating_point():
        return output
    got = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else "no tensor"
    raise ValueError(
        f'`reduction` is "{reduction}", but `fn` ({name}) returned {got}. It must return a loss: '
        "one floating-point tensor without dimensions."
    )
