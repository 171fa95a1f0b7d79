"""Tensors that are computed when somebody reads them: what a row-local call returns, row by row.

NOTE [ Values that nobody read ]

Rule 1. An `Unread` is a tensor without memory that knows the rows that it is computed from. What
        only moves rows (a slice of all but the last token, `view(-1, C)`), converts or scales is
        done to these rows, or written down for later. A reader that can do with pieces (a cross
        entropy) is registered with the call; it never sees the whole.
Rule 2. For every other function the whole is computed, in grad mode and under the autocast of the
        call, and stays: views of it and writes to it are then those of an ordinary tensor, and so
        is its graph. What was derived before a write can no longer be told from the whole, so it is
        an error to read it. Functions that only read, and return no views, leave nothing behind.
Rule 3. Code that goes past `__torch_function__` (another library's `autograd.Function`) would lose
        the gradient. The value is the output of a node whose backward is an error, so it does not.
Rule 4. The rows and the weights must be unchanged when it is read. A tensor that indexed it is
        copied, since the user may write to that tensor before the value is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from recoup._core.pytree import flatten
from recoup._core.saved_tensors import grad_mode, version_of
from recoup._core.surroundings import settings_as_now
from recoup.errors import ChangedError, GradientError
from recoup.planning.row_functions import OF_BACKWARD, OF_GRADIENT, ONLY_READ, followed, is_metadata

__all__ = ["RowCall", "Unread", "unread"]

_torch: Any = torch
_plainly = _torch._C.DisableTorchFunctionSubclass
_WAY_OUT = "Pass a copy (`.clone()`), or plan without `tiles`."


class RowCall:
    """A call that makes each row of its output from the same row of its input.

    Args:
        name: its name in error messages.
        run: the call, of a tensor (..., D), which returns (..., C).
        weights: the tensors that it reads beside that.
        readers: for functions that can do with pieces, what is called in their place with the
            value and their other arguments; it may return NotImplemented.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Tensor], Tensor],
        weights: Sequence[Tensor],
        readers: Mapping[Callable[..., Any], Callable[..., Any]],
    ) -> None:
        self.name, self.run, self.weights, self.readers = name, run, weights, readers
        self._with_settings = settings_as_now()
        self.was_read = False  # in pieces
        self._versions: list[tuple[Tensor, int]] = [(each, version_of(each)) for each in weights]

    def reads(self, rows: Tensor) -> None:
        """Note that it will read `rows`."""
        self._versions.append((rows, version_of(rows)))

    def check(self) -> None:
        """Raise if it would compute something else now (See Rule 4)."""
        if any(version_of(tensor) != version for tensor, version in self._versions):
            raise ChangedError(
                f"The output of {self.name} is computed when it is read, but what it is computed "
                "from has changed since (by an optimizer's step?). Read it before that. " + _WAY_OUT
            )

    def __call__(self, rows: Tensor) -> Tensor:
        with self._with_settings():
            return self.run(rows)


_Then = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass
class _Recipe:
    """How an `Unread` is computed.

    Args:
        call: the call that makes it.
        rows: the rows that it is computed from.
        then: what is done to each entry afterwards.
        source: what it was derived from, how, and in which grad mode.
        whole: its value, once somebody has read it, and the version that this had then.
    """

    call: RowCall
    rows: Tensor
    then: tuple[_Then, ...] = ()
    source: tuple[Unread, _Then, bool] | None = None
    whole: tuple[Tensor, int] | None = None

    @property
    def is_unread(self) -> bool:
        """Whether nobody has read the whole of it, or of what it was derived from."""
        if self.whole is not None:
            return False
        return self.source is None or self.source[0].recipe.is_unread


class Unread(Tensor):
    """The output of a `RowCall`, which is computed when somebody reads it. Made by `unread`."""

    recipe: _Recipe

    @property
    def rows(self) -> Tensor:
        """The tensor (..., D) of which `row_call` makes it."""
        return self.recipe.rows

    @property
    def made_in(self) -> torch.dtype:
        """The type that the call itself returns."""
        return self.dtype if self.recipe.source is None else self.recipe.source[0].made_in

    def piece(self, rows: Tensor) -> Tensor:
        """Return the rows of it that are made of `rows`."""
        found = self.recipe.call(rows)
        for fn, args, kwargs in self.recipe.then:
            found = fn(found, *args, **kwargs)
        return found

    def check(self) -> None:
        """Raise if it can no longer be computed (See Rules 2 and 4)."""
        self.recipe.call.check()
        source = self.recipe.source
        while source is not None:
            recipe = source[0].recipe
            if recipe.whole is not None and version_of(recipe.whole[0]) != recipe.whole[1]:
                raise ChangedError(
                    f"The output of {recipe.call.name} was changed in place after something was "
                    "derived from it, which is read only now. Change it first. " + _WAY_OUT
                )
            source = recipe.source

    def whole(self) -> Tensor:
        """Return the value as an ordinary tensor, which stays (See Rule 2)."""
        recipe = self.recipe
        if recipe.whole is None:
            self.check()
            if recipe.source is None:
                with grad_mode(True):
                    found = recipe.call(recipe.rows)
            else:
                source, (fn, args, kwargs), is_grad_enabled = recipe.source
                with grad_mode(is_grad_enabled):
                    found = fn(source.whole(), *args, **kwargs)
            recipe.whole = found, version_of(found)
        return recipe.whole[0]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in OF_BACKWARD:
            _check_asked((args, kwargs))
        if isinstance(first, Unread) and first.recipe.is_unread:
            with _plainly():
                if is_metadata(func):
                    return func(*args, **kwargs)
                # What has no graph must not get one where it is read (See Rule 2).
                keeps_mode = torch.is_grad_enabled() or not first.requires_grad
            found = first._unread_result(func, args[1:], kwargs) if keeps_mode else NotImplemented
            if found is not NotImplemented:
                return found
        tensors, tree = flatten((args, kwargs))
        read = _computed if func in ONLY_READ else Unread.whole
        given: Any = tree.unflatten(tuple(read(t) if isinstance(t, Unread) else t for t in tensors))
        return func(*given[0], **given[1])

    def _unread_result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a function makes of it without the whole, or NotImplemented (See Rule 1)."""
        call, reader = self.recipe.call, self.recipe.call.readers.get(func)
        if reader is not None:
            found = reader(self, *args, **kwargs)
            call.was_read |= found is not NotImplemented
            return found
        if func in OF_GRADIENT:
            _check_asked(self)
            return NotImplemented
        if any(isinstance(t, Unread) for t in flatten((args, kwargs))[0]):
            return NotImplemented
        found = followed(func, args, kwargs, self, self.rows)
        if found is None:
            return NotImplemented
        rows, dtype, is_later = found
        given = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)  # See Rule 4
        done: _Then = (func, given, kwargs)
        then = (*self.recipe.then, done) if is_later else self.recipe.then
        source = (self, done, torch.is_grad_enabled())
        return _made(_Recipe(call, rows, then, source), self.shape[-1], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise GradientError(
            f"{func} was given a tensor that is computed when it is read, past what torch offers "
            "tensors to see that. " + _WAY_OUT
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return cast("Any", self.whole()).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return cast("Any", self.whole()).__deepcopy__(memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        return repr(self.whole())


def unread(rows: Tensor, call: RowCall) -> Tensor:
    """Return the output of `call` for `rows`, computed when somebody reads it.

    Kept: `rows`. Whoever reads the whole pays the call, and holds it as long as this tensor.

    Args:
        rows: a tensor (..., D).
        call: the call.
    """
    call.reads(rows)
    with torch.no_grad():
        one = call(rows.detach().reshape(-1, rows.shape[-1])[:1])
    return _made(_Recipe(call, rows), one.shape[-1], one.dtype)


def _made(recipe: _Recipe, width: int, dtype: torch.dtype) -> Unread:
    call, shape = recipe.call, (*recipe.rows.shape[:-1], width)
    found = cast("Any", _Node).apply(call.name, shape, dtype, recipe.rows, *call.weights)
    found.recipe = recipe
    return found


class _Node(torch.autograd.Function):
    """The node that made an `Unread`, through which no gradient goes (See Rule 3)."""

    @staticmethod
    def forward(
        ctx: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, rows: Tensor, *_: Tensor
    ) -> Tensor:
        ctx.name = name
        return cast("Any", Tensor)._make_wrapper_subclass(
            Unread, shape, dtype=dtype, device=rows.device
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GradientError(
            f"The output of {ctx.name}, which is computed when it is read, was given to an "
            "autograd function that is not torch's own, which would lose its gradient. " + _WAY_OUT
        )


def _check_asked(values: Any) -> None:
    """Raise where the gradient of a value is asked for whose reader took it in pieces."""
    for value in flatten(values)[0]:
        if isinstance(value, Unread) and value.recipe.is_unread and value.recipe.call.was_read:
            raise GradientError(
                f"The output of {value.recipe.call.name} has no gradient of its own: its reader "
                "took it in pieces. " + _WAY_OUT
            )


def _computed(value: Unread) -> Tensor:
    """Return the value for a function that only reads it."""
    if not value.recipe.is_unread:
        return value.whole()
    value.check()
    return value.piece(value.rows)
