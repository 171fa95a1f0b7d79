"""The tiles of a call: its arguments in pieces, its result from theirs; the check of its function.

NOTE [ What is split ]

Rule 1. The first tensor that is split has the rows. Another one is split if it has as many at `dim`
        and the dimensions before it agree, where 1 agrees with any. So labels (N, L) are split with
        values (N, L, D), and a mask (N, 1, L, L) is not. Parameters are not split unless named.
Rule 2. A tensor that has as many by chance must not be split, and one that is not split must not
        be meant to be: where the dimensions before `dim` do not agree, it is an error not to say.
Rule 3. Tiles differ by at most one row. There are fewer where there are fewer rows, and one where
        there are none.

NOTE [ When a function is checked ]

Rule 4. A loss is checked in each call: whether a mean weights its rows may depend on their values.
Rule 5. Another function is checked in the first call of its kind, which its code, the numbers that
        it holds, five levels deep, and arguments that are no tensors tell. A check that could show
        nothing (rows that are all alike) is made again.
Rule 6. Where a mean over targets has a part that is a mean over all rows (a distillation beside a
        cross entropy), only rows that have fewer targets than others show it. So those with the
        most are one half of a check, and the other one has those with the least, and some others.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from recoup._core.captured import captured_by
from recoup._core.pytree import Tree, flatten, flatten_arguments, flatten_containers
from recoup._core.rows import Found, RowCheck, few_of
from recoup._core.saved_tensors import is_transformed
from recoup.errors import ChangedError

Reduction = Literal["none", "mean", "sum"]
_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


@dataclass(frozen=True)
class Cut:
    """The way in which calls are cut: all arguments of `tiled` but the function."""

    dim: int
    tiles: int
    split: Sequence[int | str] | None
    reduction: Reduction
    target: int | str | None
    ignore_index: int

    def __post_init__(self) -> None:
        split: Any = self.split
        is_list = isinstance(split, Sequence) and not isinstance(split, str)
        for name, is_right, needed in (
            ("dim", type(self.dim) is int, "an int: the dimension of the rows"),
            ("tiles", type(self.tiles) is int and self.tiles > 0, "an int of at least 1"),
            ("reduction", self.reduction in ("none", "mean", "sum"), '"none", "mean" or "sum"'),
            ("target", type(self.target) in (type(None), int, str), "a position or name"),
            ("ignore_index", type(self.ignore_index) is int, "an int"),
            ("split", split is None or is_list, "a list of positions and names of arguments"),
        ):
            if not is_right:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, but must be {needed}.")


class Tiles:
    """The arguments of one call, and which of their tensors are split."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], cut: Cut) -> None:
        self._args, self._kwargs, self.cut = args, kwargs, cut
        self._tensors, self._tree = flatten_arguments(args, kwargs)
        named = None if cut.split is None else self._ids_of(cut.split)
        given = [t for t in self._tensors if named is None or id(t) in named]
        rows = next((t for t in given if named or not isinstance(t, nn.Parameter)), None)
        if rows is None:
            raise ValueError(
                f"`split` is {cut.split!r}, and no argument that it allows is a tensor. Pass the "
                "tensor with the rows, and name it in `split` if it is a parameter."
            )
        if not -rows.dim() <= cut.dim < rows.dim():
            raise ValueError(
                f"`dim` is {cut.dim}, but the first tensor among the arguments that are split has "
                f"shape {tuple(rows.shape)}. Give the dimension of its rows."
            )
        if rows.is_nested or rows.layout is not torch.strided:
            raise ValueError(
                f"`split` is {cut.split!r}, and the first tensor that it allows is a nested or "
                f"sparse one ({rows.layout}), which has no tiles. Give it as a dense tensor."
            )
        self.dim = cut.dim % rows.dim()
        self.num_rows = rows.shape[self.dim]
        split = given if named else [t for t in given if _has_rows(t, rows, self.dim)]
        self.split = list({id(tensor): tensor for tensor in split}.values())  # each once
        ids = set(map(id, self.split))
        self.others = [tensor for tensor in self._tensors if id(tensor) not in ids]
        for tensor in self.split:
            if tensor.dim() <= self.dim or tensor.shape[self.dim] != self.num_rows:
                raise ValueError(
                    f"`split` names an argument of shape {tuple(tensor.shape)}, which must have "
                    f"{self.num_rows} rows in dimension {self.dim}, as the first one. Leave it out."
                )
        num_tiles = max(1, min(cut.tiles, self.num_rows))  # See Rule 3
        size, more = divmod(self.num_rows, num_tiles)
        self.sizes = [size + (place < more) for place in range(num_tiles)]  # rows of each tile
        self._targets = None if cut.reduction == "none" else self._counted()

    @property
    def kind(self) -> Hashable:
        """The same for two calls that are cut alike."""
        ids = set(map(id, self.others))
        values = map(_mark, (*self._args, *self._kwargs, *self._kwargs.values()))
        return (self.dim, *values, *((t.dim(), id(t) in ids) for t in self._tensors))

    def given(self, parts: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with `parts` in the places of the tensors that are split."""
        own = dict(zip(map(id, self.split), parts, strict=True))
        tensors = tuple([own.get(id(tensor), tensor) for tensor in self._tensors])
        given: Any = self._tree.unflatten(tensors)
        return (given, {}) if self._tree.is_flat else given

    def weights(self) -> tuple[list[float], float]:
        """Return what each tile counts in the result, and what their sum is divided by."""
        if self.cut.reduction == "sum" or len(self.sizes) == 1 or self._targets is None:
            return [1.0] * len(self.sizes), 1.0
        parts = cast("Sequence[Tensor]", self._targets.split(self.sizes))
        counts = torch.stack([part.sum() for part in parts])
        # Without any target it is what `fn` makes of none: nan for most.
        found = cast("list[int]", counts.tolist()) if counts.any() else self.sizes
        return list(map(float, found)), float(sum(found))

    def share(self, rows: Sequence[int]) -> float:
        """Return what a loss of these rows counts, of all rows."""
        if self.cut.reduction == "sum" or self._targets is None:
            return 1 / self.num_rows
        return float(self._targets[[*rows]].sum()) / self.num_rows

    def rows_to_check(self) -> Sequence[int]:
        """Return rows, those with the most targets first, and some without any (See Rule 6)."""
        if self._targets is None:
            return range(self.num_rows)
        counts = cast("list[int]", self._targets.tolist())
        rows = sorted(range(self.num_rows), key=lambda row: -counts[row])
        num_counted = sum(map(bool, counts))
        return rows[: num_counted + (num_counted // 2 if self.sizes[-1] > 2 else 0)]

    def _counted(self) -> Tensor:
        """Return how many targets each row has; one each if no argument has them."""
        target, is_mean = self.cut.target, self.cut.reduction == "mean"
        named = self._ids_of([target]) if target is not None and is_mean else None
        found = [t for t in self.split if t.dtype in _INTEGERS]
        found = [t for t in found if named is None or id(t) in named]
        if named is not None and len(found) != 1:
            raise ValueError(
                f"`target` is {target!r}, but that argument has {len(found)} tensors of integers "
                "that are split. Name the one with the targets."
            )
        if is_mean and len(found) > 1:
            raise ValueError(
                f"{len(found)} arguments are tensors of integers, and `target` does not say which "
                "has the targets that a mean counts. Give its position or its name."
            )
        if len(found) != 1:
            return torch.ones(self.num_rows)
        is_target = found[0].detach() != self.cut.ignore_index
        return is_target[..., None].movedim(self.dim, 0).flatten(1).sum(1)

    def _ids_of(self, names: Sequence[int | str]) -> set[int]:
        found: set[int] = set()
        for name in names:
            try:
                value = self._args[name] if isinstance(name, int) else self._kwargs[name]
            except (IndexError, KeyError):
                raise ValueError(
                    f"`split` or `target` names {name!r}, but the call has {len(self._args)} "
                    f"positional arguments and the keywords {list(self._kwargs)}."
                ) from None
            found.update(map(id, flatten_containers(value)[0]))
        return found


def _has_rows(tensor: Tensor, rows: Tensor, dim: int) -> bool:
    if tensor.dim() <= dim or isinstance(tensor, nn.Parameter):
        return False
    if tensor.shape[dim] != rows.shape[dim] or rows.shape[dim] == 1:
        return tensor is rows
    before = zip(tensor.shape[:dim], rows.shape[:dim], strict=True)
    agree = all(a == b or 1 in (a, b) for a, b in before)
    # Numbers may be broadcast along the last dimensions instead.
    may_be_features = tensor.is_floating_point() and tensor.dim() < rows.dim()
    last = zip(reversed(tensor.shape), reversed(rows.shape), strict=False)
    may_be_features = may_be_features and all(a in (b, 1) for a, b in last)
    if agree and not may_be_features:
        return True
    doubt = "it may have a value a row, or one a feature" if agree else "as many rows, by chance?"
    raise ValueError(  # See Rule 2
        f"An argument has shape {tuple(tensor.shape)} beside the first one, of shape "
        f"{tuple(rows.shape)}: {doubt}. `split` must say which are split: give positions and names."
    )


def joined(outputs: Sequence[Any], sizes: Sequence[int], dim: int, name: str) -> Any:
    """Return the outputs of tiles as one: their tensors concatenated, all else as it is."""
    first: Tree = flatten(outputs[0])[1]
    columns: list[tuple[Tensor, ...]] = []
    for output, size in zip(outputs, sizes, strict=True):
        tensors, tree = flatten(output)
        if tree is not first and not first.matches(tree):
            raise ValueError(
                f"`fn` ({name}) returned values of another structure, or others that are not "
                "tensors, for another tile. Return a number as a tensor with an entry a row."
            )
        for tensor in tensors:
            if tensor.dim() <= dim or tensor.shape[dim] != size:
                raise ValueError(
                    f"`fn` ({name}) does not treat rows independently: of {size} rows it returned "
                    f"a tensor of shape {tuple(tensor.shape)}. Return one entry a row in dimension "
                    f'{dim}; for a loss, give `reduction="mean"` or "sum".'
                )
        columns.append(tensors)
    if len(outputs) == 1:
        return outputs[0]
    return first.unflatten(tuple(torch.cat(parts, dim) for parts in zip(*columns, strict=True)))


def tile_value(output: Any, name: str, reduction: Reduction) -> Tensor:
    """Return the loss of a tile; raise if it is none."""
    if isinstance(output, Tensor) and output.dim() == 0 and output.is_floating_point():
        return output
    got = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else "no tensor"
    raise ValueError(
        f'`reduction` is "{reduction}", but `fn` ({name}) returned {got}. It must return a loss: '
        "one floating-point tensor without dimensions."
    )


_checked: set[Hashable] = set()
_NUMBERS = (bool, int, float, str, type(None))
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_MOST_ENTRIES = 256  # of a container that are looked at, and containers


def check_all_rows(name: str, fn: Callable[..., Any], tiles: Tiles) -> None:
    """Check a function on all rows of a call, with the gradients of arguments and leaves."""
    _demand(name, _check_of(name, fn, tiles, takes_gradients=True).mixes(tiles.rows_to_check()))


def check_few_rows(name: str, fn: Callable[..., Any], tiles: Tiles) -> None:
    """Check a function on a few rows (See Rules 4 and 5)."""
    is_plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_meta for t in tiles.split)
    if len(tiles.sizes) == 1 or not is_plain or is_transformed():
        return
    kind = (tiles.kind, _mark(fn), *map(_mark, captured_by(fn)))
    if tiles.cut.reduction == "none" and kind in _checked:
        return
    rows, check = tiles.rows_to_check(), _check_of(name, fn, tiles)
    try:
        found = check.mixes(few_of(rows, tiles.sizes[-1]))
    except ChangedError:
        raise
    except Exception:  # noqa: BLE001  # some kernels need more than a few
        try:
            found = check.mixes(few_of(rows, tiles.sizes[-1], sum(tiles.sizes[:2])))
        except Exception as error:
            error.add_note("`fn` must run for any number of rows: this was a check of a few.")
            raise
    _demand(name, found)
    if found is not None:
        _checked.add(kind)


def _demand(name: str, mixes: str | None) -> None:
    if mixes:
        raise ValueError(f"`fn` ({name}) does not treat rows independently: {mixes}")


def _check_of(
    name: str, fn: Callable[..., Any], tiles: Tiles, *, takes_gradients: bool = False
) -> RowCheck:
    def run(rows: Sequence[int], own: dict[int, Tensor]) -> Found:
        args, kwargs = tiles.given(list(own.values()))
        output = fn(*args, **kwargs)
        if tiles.cut.reduction == "none":
            ends = flatten(joined([output], [len(rows)], tiles.dim, name))[0]
            return [(f"output {place}", each, False) for place, each in enumerate(ends)]
        value = tile_value(output, name, tiles.cut.reduction)
        return [("the loss", value * tiles.share(rows), True)]

    return RowCheck(fn, tiles.split, tiles.dim, run, takes_gradients)


def _mark(value: Any, depth: int = 5, seen: set[int] | None = None) -> Hashable:
    """Return what tells a function, or a value that it holds, from another one.

    Containers and attributes are looked into, `depth` levels deep and each once.
    """
    seen = set() if seen is None else seen
    if isinstance(value, _NUMBERS):
        return type(value), value
    if isinstance(value, functools.partial):
        found = cast("functools.partial[Any]", value)
        return (_mark(found.func), *found.keywords)
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    if code is not None or not callable(value):
        kind: type[Any] = type(cast("object", value))
        is_new = depth > 0 and id(value) not in seen and len(seen) < _MOST_ENTRIES
        return code or (kind, *(_marks_within(value, depth, seen) if is_new else ()))
    modules = value.modules() if isinstance(value, nn.Module) else ()
    own = [{k: v for k, v in vars(each).items() if k not in _OF_MODULES} for each in modules]
    marks = tuple(mark for each in own for mark in _marks_within(each, depth, seen))
    try:
        found = hash(value)
    except TypeError:  # or a method of what cannot be hashed
        return type(cast("object", value))
    try:
        return (weakref.ref(value), marks, found)
    except TypeError:
        return value  # a function of C, which stays


def _marks_within(value: Any, depth: int, seen: set[int]) -> Iterator[Hashable]:
    """Yield the marks of the entries of a container, or of the attributes of an object."""
    seen.add(id(value))
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, (list, tuple, set, frozenset)):
        pairs = enumerate(cast("Iterable[Any]", value))
    else:
        held = cast("Any", value) if isinstance(value, dict) else getattr(value, "__dict__", {})
        pairs = held.items()
    for name, each in islice(pairs, _MOST_ENTRIES):
        if not isinstance(each, Tensor):
            yield name, _mark(each, depth - 1, seen)
