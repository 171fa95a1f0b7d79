"""The check of a function that runs in tiles: in its first call, or of all rows of a call.

NOTE [ Checked once ]

Its code and what it holds, one level deep, tell which function it is. A check that could show
nothing (rows that are all alike, a loss without targets) is made again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from recoup._core.captured import captured_by
from recoup._core.pytree import flatten
from recoup._core.row_check import Found, RowCheck, few_of
from recoup._core.saved_tensors import is_transformed
from recoup.regions.tiles import Tiles, joined, tile_value

_checked: set[Hashable] = set()


def check_all_rows(name: str, fn: Callable[..., Any], tiles: Tiles) -> None:
    """Check a function on all rows of a call, with the gradients of arguments and leaves.

    Raises:
        ValueError: if the function does not treat rows independently.
    """
    _demand(name, _check_of(name, fn, tiles, takes_gradients=True).mixes(tiles.counted_rows()))


def check_once(name: str, fn: Callable[..., Any], tiles: Tiles) -> None:
    """Check a function on a few rows, in the first call of its kind.

    Raises:
        ValueError: if the function does not treat rows independently.
    """
    is_plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_meta for t in tiles.split)
    if len(tiles.sizes) == 1 or not is_plain or is_transformed():
        return
    kind = (tiles.kind, _mark(fn), *map(_mark, captured_by(fn)))
    if kind in _checked:
        return
    rows, check = tiles.counted_rows(), _check_of(name, fn, tiles)
    try:
        found = check.mixes(few_of(rows, tiles.sizes[-1]))
    except Exception:  # noqa: BLE001  # some kernels need more than a few
        try:
            found = check.mixes(rows[: sum(tiles.sizes[:2])])
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


def _mark(value: Any) -> Hashable:
    """Return what tells a function, or a value that it holds, from another one."""
    if isinstance(value, functools.partial):
        value = cast("Any", value).func
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    if code is not None or not callable(value):
        return code or type(cast("object", value))
    modes = tuple(m.training for m in value.modules()) if isinstance(value, nn.Module) else ()
    try:
        return (weakref.ref(value), modes, hash(value))
    except TypeError:  # a function of C, which stays, or what cannot be hashed
        return value if cast("Any", value).__hash__ else type(cast("object", value))
