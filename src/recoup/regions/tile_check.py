"""The check that a function treats rows independently, which `tiled` makes at a first call.

NOTE [ Rows that do not know each other ]

Rule 1. Some rows are looked at, in two parts, a and b. `fn` runs on ab, and beside it on ab' and
        a'b, where a' and b' are other rows of the same call. The rows of a must come out as they do
        beside b', and those of b as beside a'. Shapes and random states are equal in these runs, so
        this holds to the bit, also if `fn` draws; where it groups rows (experts), to rounding.
Rule 2. What is summed over rows (a loss, the gradient of a parameter) is a sum over a and b only if
        ab - ab' - a'b + a'b' is zero.
Rule 3. A function that does not draw runs on a and on b alone, too, which shows whether it knows
        the places or the number of rows. Kernels round otherwise for fewer rows, so this is coarse.
Rule 4. Nobody sees these runs: no pair of hooks, no dispatch mode and no cache of autocast. Random
        states are as before. A buffer that has changed is an error, and is put back.
Rule 5. Its code and what it holds, one level deep, tell which function it is. A check that could
        show nothing (rows that are all alike, a loss without targets) is made again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from recoup._core.captured import captured_by, parts_of
from recoup._core.generators import generator_states, same_states, set_generator_states
from recoup._core.graph_ends import ends_of
from recoup._core.pytree import flatten
from recoup._core.saved_tensors import grad_mode, is_transformed, version_of, without_pairs
from recoup._core.sketch import tolerance_of
from recoup.regions.tiles import Tiles, joined, tile_value

__all__ = ["RowCheck", "check_once"]

_COARSE = 16  # tolerances
_checked: set[Hashable] = set()  # See Rule 5


class _MixesRowsError(ValueError):
    """The error of a function that does not treat rows independently."""


class _Value(NamedTuple):
    """The name of what a run makes: a value with an entry a row, or a sum over rows."""

    name: str
    is_sum: bool = False
    leaf: int = 0


class RowCheck:
    """The check of a function, on the rows of one call.

    Args:
        name: the name of `fn` in error messages.
        fn: the function.
        tiles: the arguments, and how they are cut.
    """

    def __init__(self, name: str, fn: Callable[..., Any], tiles: Tiles) -> None:
        self._name, self._fn, self._tiles = name, fn, tiles
        self._rows = tiles.counted_rows()
        self._with_gradients = self._draws = False
        buffers = [each for module in parts_of(fn)[1] for each in module.named_buffers()]
        self._buffers = [(name, each, version_of(each), each.clone()) for name, each in buffers]

    def of_few_rows(self) -> bool:
        """Check a few rows; return whether that could show anything.

        Raises:
            ValueError: if the function does not treat rows independently.
        """
        # Odd, so that a shift by a power of two is seen; no more than a tile has, but for two.
        size = self._tiles.sizes[-1]
        num = min(5 if size > 4 else 3 if size > 2 else 2, len(self._rows))
        few = [self._rows[i * (len(self._rows) - 1) // (num - 1)] for i in range(num) if num > 1]
        try:
            return self._compare(few)
        except _MixesRowsError:
            raise
        except Exception:  # noqa: BLE001 - some kernels need more rows
            try:
                return self._compare(self._rows[: sum(self._tiles.sizes[:2])])
            except Exception as error:
                error.add_note("`fn` must run for any number of rows: this was a check of a few.")
                raise

    def of_all_rows(self) -> None:
        """Check all rows, and the gradients of arguments and parameters too.

        Raises:
            ValueError: if the function does not treat rows independently.
        """
        self._with_gradients = True
        with grad_mode(True), without_pairs():
            self._compare(self._rows)

    def _compare(self, rows: Sequence[int]) -> bool:
        """Compare runs on these rows; return whether that could show anything."""
        half, dim = len(rows) // 2, self._tiles.dim
        a, b = list(rows[:half]), list(rows[half:])
        other_a, other_b = b[:half], [*a, *a][: len(b)]
        if not a or all(map(torch.equal, self._at(a + b), self._at(other_a + other_b))):
            return False
        ab, beside_a, beside_b = map(self._run, (a + b, a + other_b, other_a + b))
        sums = [key for key in ab if key.is_sum]
        if not all(bool(ab[key].isfinite().all()) for key in sums):
            return False
        both = self._run(other_a + other_b) if sums else {}
        alone = [] if self._draws else [self._run(a), self._run(b)]
        for key, whole in ab.items():
            tolerance = self._tolerance(whole)
            parts = [run[key] for run in alone if key in run]
            if key.is_sum:  # See Rule 2
                beside = [run[key] for run in (beside_a, beside_b) if key in run]
                plus = [whole, *(run[key] for run in (both,) if key in run)]
                exact = tolerance if key.leaf else tolerance_of(whole.dtype)
                self._demand(key, plus, beside, _COARSE * exact)
            else:  # See Rule 1
                for run, start, size in ((beside_a, 0, half), (beside_b, half, len(b))):
                    pair = [each.narrow(dim, start, size) for each in (whole, run[key])]
                    self._demand(key, pair[:1], pair[1:], tolerance)
                parts = [torch.cat(parts, dim)] if parts else []
            if alone and (whole.is_floating_point() or whole.is_complex()):  # See Rule 3
                self._demand(key, [whole], parts, _COARSE * tolerance)
        return all(bool(ab[key].any()) for key in sums)

    def _at(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the tensors among the arguments with only some rows, in a graph of their own."""
        own: dict[int, Tensor] = {}  # a tensor that is there twice is one
        for tensor, is_split in zip(self._tiles.tensors, self._tiles.is_split, strict=True):
            if is_split and id(tensor) not in own:
                index = torch.tensor(rows, device=tensor.device)
                part = tensor.detach().index_select(self._tiles.dim, index)
                asks = self._with_gradients and (part.is_floating_point() or part.is_complex())
                own[id(tensor)] = part.requires_grad_(asks or tensor.requires_grad)
        return [own.get(id(tensor), tensor) for tensor in self._tiles.tensors]

    def _run(self, rows: Sequence[int]) -> dict[_Value, Tensor]:
        """Run the function on some rows."""
        tiles, tensors = self._tiles, self._at(rows)
        args, kwargs = tiles.given(tensors)
        with self._unseen():
            output = self._fn(*args, **kwargs)
            if tiles.cut.reduction == "none":
                outputs = flatten(joined([output], [len(rows)], tiles.dim, self._name))[0]
                found = {_Value(f"output {i}"): each.detach() for i, each in enumerate(outputs)}
                given = [each.detach().sin() + 1.5 for each in outputs]  # differs from row to row
            else:
                outputs = (tile_value(output, self._name, tiles.cut.reduction),)
                (weight,) = tiles.weights([tensors], [len(rows)])
                given = [torch.full_like(outputs[0], weight / len(self._rows))]
                found = {_Value("the loss", is_sum=True): outputs[0].detach() * given[0]}
            if self._with_gradients:
                found |= self._gradients(tensors, outputs, given)
        return found

    def _gradients(
        self, tensors: Sequence[Tensor], outputs: Sequence[Tensor], given: Sequence[Tensor]
    ) -> dict[_Value, Tensor]:
        """Return the gradients of the arguments that are split, and of leaves."""
        ends = [(end, each) for end, each in zip(outputs, given, strict=True) if end.requires_grad]
        if not ends:
            return {}
        pairs = zip(tensors, self._tiles.is_split, strict=True)
        asked = {id(t): t for t, is_split in pairs if is_split and t.requires_grad}
        keys = {key: _Value(f"the gradient of argument {i}") for i, key in enumerate(asked)}
        for leaf in ends_of(outputs).leaves:
            name = f"the gradient of a parameter of shape {tuple(leaf.shape)}"
            keys.setdefault(id(leaf), _Value(name, is_sum=True, leaf=id(leaf)))
            asked[id(leaf)] = leaf
        gradients = torch.autograd.grad(
            [end for end, _ in ends],
            list(asked.values()),
            [each for _, each in ends],
            retain_graph=True,
            materialize_grads=True,
            allow_unused=True,
        )
        return dict(zip(keys.values(), gradients, strict=True))

    @contextmanager
    def _unseen(self) -> Generator[None]:
        """Return a context for a run (See Rule 4)."""
        states, has_cache = generator_states(), torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            self._draws |= not same_states(states, generator_states())
            set_generator_states(states)
            torch.set_autocast_cache_enabled(has_cache)
        for name, buffer, version, _ in self._buffers:
            if version_of(buffer) != version:
                raise self._error(
                    f"it changes its buffer `{name}`, which tiles change once each. Leave that "
                    "out of `fn`, or call `.eval()` on it."
                )

    def _error(self, why: str) -> _MixesRowsError:
        with torch.no_grad():
            for _, buffer, _, before in self._buffers:  # batch norm hides that it changes some
                buffer.copy_(before)
        return _MixesRowsError(f"`fn` ({self._name}) does not treat rows independently: {why}")

    def _tolerance(self, value: Tensor) -> float:
        """Return what rounding explains, in the least exact type that `value` may be made in."""
        kind, parts = value.device.type, parts_of(self._fn)[1]
        dtypes = {value.dtype, *(p.dtype for module in parts for p in module.parameters())}
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        if kind != "cpu":  # a product of float32 may be of TF32
            dtypes.add(torch.float16)
        return max(map(tolerance_of, dtypes))

    def _demand(
        self, key: _Value, plus: Sequence[Tensor], minus: Sequence[Tensor], allowed: float
    ) -> None:
        """Raise unless the sums of two lists are the same."""
        error = _difference(plus, minus)
        if not error <= allowed:
            raise self._error(
                f"{key.name} differs by {error:.2g} of its size with other rows beside, where "
                f"rounding explains {allowed:.2g}. Do not tile it, give another `dim`, say in "
                "`split` which arguments have the rows, or call `.eval()` if it has norms over "
                "rows."
            )


def check_once(name: str, fn: Callable[..., Any], tiles: Tiles) -> None:
    """Check a function in the first call of its kind (See Rule 5).

    Raises:
        ValueError: if the function does not treat rows independently.
    """
    is_plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_meta for t in tiles.split)
    if len(tiles.sizes) == 1 or not is_plain or is_transformed():
        return
    kind = (tiles.kind, _mark(fn), *map(_mark, captured_by(fn)))
    if kind not in _checked:
        with without_pairs(), _disable_current_modes():  # See Rule 4
            tells = RowCheck(name, fn, tiles).of_few_rows()
        if tells:
            _checked.add(kind)


def _mark(value: Any) -> Hashable:
    """Return what tells a function, or a value that it holds, from another one."""
    if isinstance(value, functools.partial):
        value = cast("Any", value).func
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    if code is not None:
        return code
    if not callable(value):
        return type(cast("object", value))
    modes = tuple(m.training for m in value.modules()) if isinstance(value, nn.Module) else ()
    try:
        return (weakref.ref(value), modes, hash(value))
    except TypeError:  # a function of C, which stays, or what cannot be hashed
        return value if cast("Any", value).__hash__ else type(cast("object", value))


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
    """Return the values in a row, in at least 32 bits; what is not finite is a number, too."""
    real = torch.view_as_real(value) if value.is_complex() else value
    wide = real.to(torch.promote_types(real.dtype, torch.float32))
    return wide.nan_to_num(nan=3.0, posinf=2.0, neginf=-2.0).flatten()
