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
        states are as before, and so are buffers and tensors that the function holds, by value: some
        kernels leave versions alone. That a buffer has changed is an error.
Rule 5. Its code and what it holds, one level deep, tell which function it is. A check that could
        show nothing (rows that are all alike, a loss without targets) is made again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from recoup._core.captured import captured_by, parts_of
from recoup._core.generators import generator_states, generators_restored, same_states
from recoup._core.graph_ends import ends_of
from recoup._core.pytree import flatten, tensors_in
from recoup._core.saved_tensors import grad_mode, is_transformed, without_pairs
from recoup._core.sketch import tolerance_of
from recoup.regions.tiles import Tiles, joined, tile_value

__all__ = ["check_all_rows", "check_once"]

_COARSE = 16  # tolerances
_LOSS = "the loss"
_checked: set[Hashable] = set()  # See Rule 5


class _MixesRowsError(ValueError):
    """The error of a function that does not treat rows independently."""


_Found = list[tuple[str, Tensor, bool]]  # names, values, and whether they are sums over rows


class _RowCheck:
    """The check of a function, on the rows of one call."""

    def __init__(self, name: str, fn: Any, tiles: Tiles, *, takes_gradients: bool = False) -> None:
        self._name, self._fn, self._tiles = name, fn, tiles
        self._draws, self._takes_gradients = False, takes_gradients
        self._leaves: list[Tensor] = []  # of the first run that takes gradients
        self._modules = parts_of(fn)[1]
        held = {id(t): ("", t) for t in tensors_in(captured_by(fn))}
        held |= {id(t): (name, t) for m in self._modules for name, t in m.named_buffers()}
        self._held = [
            (name, tensor, tensor.detach().clone())
            for name, tensor in held.values()
            if type(tensor) is Tensor and tensor.layout is torch.strided
            if not (tensor.requires_grad or tensor.is_quantized or tensor.is_meta)
        ]

    def tells(self, rows: Sequence[int]) -> bool:
        """Compare runs on these rows; return whether that could show anything.

        Raises:
            ValueError: if the function does not treat rows independently.
        """
        half, dim = len(rows) // 2, self._tiles.dim
        a, b = list(rows[:half]), list(rows[half:])
        other_a, other_b = b[:half], [*a, *a][: len(b)]
        if not a or all(map(torch.equal, self._at(a + b), self._at(other_a + other_b))):
            return False
        runs = [self._run(each) for each in (a + b, a + other_b, other_a + b, other_a + other_b)]
        alone = [] if self._draws else [self._run(a), self._run(b)]
        is_telling = True
        for place, (name, value, is_sum) in enumerate(runs[0]):
            beside_b, beside_a, neither = [run[place][1] for run in runs[1:]]
            plus, parts, allowed = [value], [run[place][1] for run in alone], self._tolerance(value)
            if is_sum:  # See Rule 2
                if not value.isfinite().all():
                    return False
                is_telling &= bool(value.any())
                plus, minus = [value, neither], [beside_b, beside_a]
            else:  # See Rule 1
                own = beside_b.narrow(dim, 0, half), beside_a.narrow(dim, half, len(b))
                minus, parts = [torch.cat(own, dim)], [torch.cat(parts, dim)] if parts else []
            exact = tolerance_of(value.dtype) if name == _LOSS else allowed
            self._demand(name, plus, minus, _COARSE * exact if is_sum else exact)
            if parts and (value.is_floating_point() or value.is_complex()):  # See Rule 3
                self._demand(name, [value], parts, _COARSE * allowed)
        return is_telling

    def _at(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the tensors among the arguments with only some rows, in a graph of their own."""
        own: dict[int, Tensor] = {}  # a tensor that is there twice is one
        for tensor in self._tiles.split:
            index = torch.tensor(rows, device=tensor.device)
            part = tensor.detach().index_select(self._tiles.dim, index)
            asks = self._takes_gradients and (part.is_floating_point() or part.is_complex())
            own.setdefault(id(tensor), part.requires_grad_(asks or tensor.requires_grad))
        pairs = zip(self._tiles.tensors, self._tiles.is_split, strict=True)
        return [own[id(tensor)] if is_split else tensor for tensor, is_split in pairs]

    def _run(self, rows: Sequence[int]) -> _Found:
        """Run the function on some rows."""
        tiles, tensors = self._tiles, self._at(rows)
        args, kwargs = tiles.given(tensors)
        with self._unseen():
            output = self._fn(*args, **kwargs)
            if tiles.cut.reduction == "none":
                ends = flatten(joined([output], [len(rows)], tiles.dim, self._name))[0]
                given = [each.detach().sin() + 1.5 for each in ends]  # differs from row to row
                found = [(f"output {i}", each.detach(), False) for i, each in enumerate(ends)]
            else:
                ends = (tile_value(output, self._name, tiles.cut.reduction),)
                (weight,) = tiles.weights(rows)
                given = [torch.full_like(ends[0], weight / tiles.num_rows)]
                found = [(_LOSS, ends[0].detach() * given[0], True)]
            pairs = [pair for pair in zip(ends, given, strict=True) if pair[0].requires_grad]
            takes_gradients = self._takes_gradients and pairs
            return found + (self._gradients(tensors, pairs) if takes_gradients else [])

    def _gradients(self, tensors: list[Tensor], pairs: list[tuple[Tensor, Tensor]]) -> _Found:
        """Return the gradients of the arguments that are split, and of leaves."""
        ends, given = [end for end, _ in pairs], [gradient for _, gradient in pairs]
        split = zip(tensors, self._tiles.is_split, strict=True)
        asked = {id(t): t for t, is_split in split if is_split and t.requires_grad}
        self._leaves = self._leaves or [t for t in ends_of(ends).leaves if id(t) not in asked]
        names = [(f"the gradient of argument {i}", False) for i in range(len(asked))]
        shapes = [tuple(leaf.shape) for leaf in self._leaves]
        names += [(f"the gradient of a parameter of shape {shape}", True) for shape in shapes]
        inputs, options = [*asked.values(), *self._leaves], {"materialize_grads": True}
        found: Any = torch.autograd.grad(ends, inputs, given, allow_unused=True, **options)
        return [(name, each, is_sum) for (name, is_sum), each in zip(names, found, strict=True)]

    @contextmanager
    def _unseen(self) -> Generator[None]:
        """Return a context for a run (See Rule 4)."""
        has_cache, changed = torch.is_autocast_cache_enabled(), ""
        torch.set_autocast_cache_enabled(False)
        try:
            with generators_restored() as generators:
                yield
                self._draws |= not same_states(generators.states, generator_states())
        finally:
            torch.set_autocast_cache_enabled(has_cache)
            for name, tensor, before in self._held:
                if bool(((tensor != before) & (before == before)).any()):
                    changed = changed or name
                    tensor.detach().copy_(before)
        if changed:
            raise self._error(
                f"it changes its buffer `{changed}`, which tiles change once each. Leave that out "
                "of `fn`, or call `.eval()` on it."
            )

    def _error(self, why: str) -> _MixesRowsError:
        return _MixesRowsError(f"`fn` ({self._name}) does not treat rows independently: {why}")

    def _tolerance(self, value: Tensor) -> float:
        """Return what rounding explains, in the least exact type that `value` may be made in."""
        kind = value.device.type
        dtypes = {value.dtype, *(p.dtype for module in self._modules for p in module.parameters())}
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        if kind != "cpu":  # a product of float32 may be of TF32
            dtypes.add(torch.float16)
        return max(map(tolerance_of, dtypes))

    def _demand(self, name: str, plus: list[Tensor], minus: list[Tensor], allowed: float) -> None:
        """Raise unless the sums of two lists are the same."""
        error = _difference(plus, minus)
        if not error <= allowed:
            raise self._error(
                f"{name} differs by {error:.2g} of its size with other rows beside, where "
                f"rounding explains {allowed:.2g}. Do not tile it, give another `dim`, say in "
                "`split` which arguments have the rows, or call `.eval()` if it has norms over "
                "rows."
            )


def check_all_rows(name: str, fn: Callable[..., Any], tiles: Tiles) -> None:
    """Check a function on all rows of a call, with the gradients of arguments and leaves.

    Raises:
        ValueError: if the function does not treat rows independently.
    """
    with grad_mode(True), without_pairs():
        _RowCheck(name, fn, tiles, takes_gradients=True).tells(tiles.counted_rows())


def check_once(name: str, fn: Callable[..., Any], tiles: Tiles) -> None:
    """Check a function on a few rows, in the first call of its kind (See Rule 5).

    Raises:
        ValueError: if the function does not treat rows independently.
    """
    is_plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_meta for t in tiles.split)
    if len(tiles.sizes) == 1 or not is_plain or is_transformed():
        return
    kind = (tiles.kind, _mark(fn), *map(_mark, captured_by(fn)))
    if kind in _checked:
        return
    rows, size = tiles.counted_rows(), tiles.sizes[-1]
    # Odd, so that a shift by a power of two is seen; no more than a tile has, but for two.
    num = min(5 if size > 4 else 3 if size > 2 else 2, len(rows))
    few = [rows[i * (len(rows) - 1) // (num - 1)] for i in range(num) if num > 1]
    more = rows[: sum(tiles.sizes[:2])]
    with without_pairs(), _disable_current_modes():  # See Rule 4
        check = _RowCheck(name, fn, tiles)
        for some in (few, more):
            try:
                if check.tells(some):
                    _checked.add(kind)
                return
            except _MixesRowsError:
                raise
            except Exception as error:
                if some is more:  # some kernels need more than a few
                    error.add_note(
                        "`fn` must run for any number of rows: this was a check of a few."
                    )
                    raise


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
    """Return the values in one dimension, in at least 32 bits, with numbers for nan and inf."""
    real = torch.view_as_real(value) if value.is_complex() else value
    wide = real.to(torch.promote_types(real.dtype, torch.float32))
    return wide.nan_to_num(nan=3.0, posinf=2.0, neginf=-2.0).flatten()
