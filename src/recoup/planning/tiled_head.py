"""The output layer of a model with its cross entropy, in tiles: logits that are made when read.

NOTE [ A head in tiles ]

Rule 1. A head is an `nn.Linear` that is called once, after all blocks, and whose output is large.
        Its weight may be computed (a parametrization, weight dropout). What it returns is not
        computed before somebody reads it; a cross entropy is computed in pieces, whose gradients
        are taken at once (See NOTE [ Gradients of a sum ]).
Rule 2. Within a checkpoint that runs the model again, where the compiler looks at frames, and in
        transforms of torch.func the head runs as it is.
Rule 3. A mean is a sum whose summands are divided by their number before they are differentiated,
        as torch does it, so that the gradient of the hidden states has its bits where kernels
        compute rows alike. In float16, where that may underflow, the sums are divided afterwards.

NOTE [ Lazy logits ]

Rule 4. `LazyLogits` are a tensor without memory that knows the rows that it is computed from. What
        only moves rows (a slice of all but the last token, `view(-1, C)`), converts or scales is
        done to these rows, or written down for later. A cross entropy runs in pieces, and never
        sees the whole.
Rule 5. For every other function the whole is computed, in grad mode and under the autocast of the
        call. If the function changes it, shares memory with it, or returns no tensor (a hook was
        set), it stays: views, writes and graphs are then those of an ordinary tensor. Otherwise it
        is freed. What was derived before a write is an error to read.
Rule 6. Code that goes past `__torch_function__` (another library's `autograd.Function`) would lose
        the gradient. The value is the output of a node whose backward is an error, so it does not.
Rule 7. The rows and the weights must be unchanged when it is read, and require gradients as they
        did. A tensor that indexed it is copied, since the user may write to that tensor before the
        value is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import GetSetDescriptorType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup._core.compile import is_watched
from recoup._core.pytree import flatten
from recoup._core.rows import summed_loss
from recoup._core.saved_tensors import (
    grad_mode,
    is_transformed,
    storage_id,
    version_of,
    without_pairs,
)
from recoup._core.settings import settings_as_now
from recoup._core.storage_tracking import bytes_of
from recoup.errors import ChangedError, GradientError
from recoup.memory import format_bytes
from recoup.planning.forwards import Args, Forward, Kwargs, enclosing_checkpoints, own_forward

_TINY = 1e-30  # numbers as small as a gradient over the number of targets
_modules = nn.modules.module
_BACKWARD_HOOKS = (
    "_backward_hooks", "_backward_pre_hooks", "_global_backward_hooks",
    "_global_backward_pre_hooks",
)  # fmt: skip


@dataclass
class TiledHead:
    """The output layer of a model in tiles, which a follower calls in place of its forward.

    Args:
        name: its qualified name.
        module: the layer.
        num_rows: the rows of its output in the step that is planned.
        num_bytes: the bytes of that output.
        tile_rows: how many rows a tile has at most.

    Attributes:
        eps: the largest machine epsilon of what was computed in tiles.
    """

    name: str
    module: nn.Module
    num_rows: int
    num_bytes: int
    tile_rows: int
    eps: float = 0.0

    @property
    def described(self) -> str:
        """A line that says in how many tiles it runs."""
        return (
            f"tile: `{self.name}` with its cross entropy, "
            f"{math.ceil(self.num_rows / self.tile_rows)} tiles of at most {self.tile_rows} rows; "
            f"its output of {format_bytes(self.num_bytes)} is computed when it is read"
        )

    def called(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Return the output, which is computed when somebody reads it."""
        is_plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if not is_plain or is_watched() or is_transformed():
            return forward(*args, **kwargs)
        rows: Tensor = args[0]
        # Hooks want the gradient of what it returns.
        hooks = [vars(each).get(name) for each in (module, _modules) for name in _BACKWARD_HOOKS]
        is_whole = rows.dim() < 2 or rows.numel() == 0 or any(hooks)
        if is_whole or enclosing_checkpoints() != (0, None) or not is_linear(module, forward):
            return forward(rows)
        # The weight of this call: `functional_call` puts others in its place for a while.
        own: Any = module
        return LinearCall(
            f"`{self.name}`", rows, own.weight, own.bias, self._cross_entropy
        ).logits()

    def _cross_entropy(
        self,
        logits: LazyLogits,
        target: Any,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        """Return the loss, computed in tiles, or NotImplemented for the one of the whole."""
        is_plain = weight is None and size_average is None and reduce is None
        is_of_rows = isinstance(target, Tensor) and logits.dim() == 2 and target.dim() == 1
        if not is_plain or reduction not in ("mean", "sum") or not is_of_rows:
            return NotImplemented
        num_rows = logits.shape[0]
        if not num_rows == target.shape[0] > self.tile_rows:
            return NotImplemented
        logits.call.check()
        parts = cast("Sequence[Tensor]", target.split(self.tile_rows))
        counts = torch.stack([(part != ignore_index).sum() for part in parts])
        weights, divisor = [float(n > 0) for n in cast("list[int]", counts.tolist())], 1.0
        if not any(weights):
            return NotImplemented  # a mean or sum of nothing is what torch makes of it
        if reduction == "mean":
            divisor = float(counts.sum())
            if torch.finfo(logits.call.dtype).smallest_normal < _TINY:  # See Rule 3
                weights, divisor = [each / divisor for each in weights], 1.0
        types = (logits.dtype, logits.call.dtype)
        self.eps = max(self.eps, *(torch.finfo(dtype).eps for dtype in types))

        def loss(piece: list[Tensor]) -> Tensor:
            options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
            return F.cross_entropy(logits.piece(piece[0]), piece[1], reduction="sum", **options)

        name, sizes = f"the loss of `{self.name}` in tiles", [len(part) for part in parts]
        return summed_loss(
            name, loss, [logits.rows, target], sizes, 0, weights, divisor,
            logits.call.weights, "Plan without `tiles`.",
        )  # fmt: skip


def is_linear(module: nn.Module, forward: Forward) -> bool:
    """Whether a module's forward is that of `nn.Linear`, with the weight that it has then."""
    own = getattr(own_forward(forward), "__func__", None)
    return isinstance(module, nn.Linear) and own is nn.Linear.forward


# -- logits that are computed when they are read ---------------------------------------------------

_torch: Any = torch
_plainly: Any = _torch._C.DisableTorchFunctionSubclass
_ATTRIBUTES = cast("dict[str, Any]", vars(_torch._C.TensorBase))
_WAY_OUT = "Pass a copy (`.clone()`), or plan without `tiles`."
_NOT_METADATA = ("data", "T", "mT", "H", "mH", "real", "imag", "grad", "grad_fn")


def _named(names: str) -> frozenset[Any]:
    """Return the functions of these names, of tensors and of torch."""
    pairs = [(where, name) for name in names.split() for where in (Tensor, torch)]
    return frozenset(getattr(*pair) for pair in pairs if hasattr(*pair))


_METADATA = _named(
    "size dim ndimension numel nelement stride element_size is_floating_point is_complex "
    "is_contiguous get_device __len__ __hash__"
) | {
    each.__get__
    for name, each in _ATTRIBUTES.items()
    if isinstance(each, GetSetDescriptorType) and name not in _NOT_METADATA
}
_ENTRYWISE = _named(
    "float double half bfloat16 to div true_divide mul tanh __truediv__ __mul__ __rmul__"
)
_RESHAPES = _named("view reshape flatten contiguous")
_OF_GRADIENT = _named("retain_grad register_hook backward") | {
    _ATTRIBUTES["grad_fn"].__get__, torch.autograd.grad, torch.autograd.backward
}  # fmt: skip
_Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class LinearCall:
    """A call of a linear output layer, with a name for error messages.

    `cross_entropy` is called in place of torch's with the logits and the other arguments; it may
    return NotImplemented.
    """

    def __init__(
        self,
        name: str,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cross_entropy: Callable[..., Any],
    ) -> None:
        self.name, self.rows = name, rows
        self.weights = [weight] if bias is None else [weight, bias]
        self.cross_entropy, self.was_cut = cross_entropy, False
        self.whole: Tensor | None = None
        self.version = 0  # of the whole, when it was computed
        self._with_settings = settings_as_now()
        self._marks = self._marks_now()

    def __call__(self, rows: Tensor) -> Tensor:
        with self._with_settings():
            return F.linear(rows, *self.weights)

    def _marks_now(self) -> list[Any]:
        """Return what is equal as long as the rows and the weights are what they were."""
        return [
            (storage_id(each), version_of(each), bytes_of([each]), each.requires_grad)
            for each in (self.rows, *self.weights)
        ]

    def check(self) -> None:
        """Raise if it would compute something else now (See Rule 7)."""
        if self._marks_now() != self._marks:
            raise ChangedError(
                f"The output of {self.name} is computed when it is read, but what it is computed "
                "from has changed since (by an optimizer's step, or FSDP2?). Read it before that. "
                + _WAY_OUT
            )

    def logits(self) -> LazyLogits:
        """Return the output, computed when somebody reads it.

        Kept: the rows. Whoever reads the whole pays the call.
        """
        # Without a graph, a cache of weights (parametrize.cached) would get some without one.
        with grad_mode(True), without_pairs():
            one = self(self.rows.detach().reshape(-1, self.rows.shape[-1])[:1])
        self.dtype = one.dtype
        return LazyLogits.made(self, self.rows, (), one.shape[-1], one.dtype)


class LazyLogits(Tensor):
    """The output of a `LinearCall`, or what was derived from it by the functions in `path`."""

    call: LinearCall
    rows: Tensor
    path: tuple[_Step, ...]
    _whole: Tensor | None

    @staticmethod
    def made(
        call: LinearCall, rows: Tensor, path: tuple[_Step, ...], width: int, dtype: torch.dtype
    ) -> LazyLogits:
        """Return logits of this width that are computed from `rows`."""
        shape = (*rows.shape[:-1], width)
        found = cast("Any", _Node).apply(call.name, shape, dtype, rows, *call.weights)
        found.call, found.rows, found.path, found._whole = call, rows, path, None
        return found

    def piece(self, rows: Tensor) -> Tensor:
        """Return the rows of it that are made of `rows`."""
        found = self.call(rows)
        for function, args, kwargs in self.path:
            found = function(found, *args, **kwargs) if function in _ENTRYWISE else found
        return found

    def whole(self) -> Tensor:
        """Return it as an ordinary tensor, which stays."""
        call = self.call
        if self._whole is None:
            with grad_mode(True):
                if call.whole is None:
                    call.check()
                    call.whole = call(call.rows)
                    call.version = version_of(call.whole)
                if self.path and version_of(call.whole) != call.version:
                    raise ChangedError(
                        f"The output of {call.name} was changed in place after something was "
                        "derived from it, which is read only now. Change it first. " + _WAY_OUT
                    )
                self._whole = call.whole
                for function, args, kwargs in self.path:
                    self._whole = function(self._whole, *args, **kwargs)
        return cast("Tensor", self._whole)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        tensors, tree = flatten((args, kwargs))
        lazy = [each for each in tensors if isinstance(each, LazyLogits)]
        if func in _OF_GRADIENT:
            cut = [each.call.name for each in lazy if each.call.was_cut and each.call.whole is None]
            if cut:
                raise GradientError(
                    f"The output of {cut[0]} has no gradient of its own: its reader took it in "
                    "pieces. " + _WAY_OUT
                )
        elif len(lazy) == 1 and first is lazy[0] and lazy[0].call.whole is None:
            with _plainly():
                if func in _METADATA:
                    return func(*args, **kwargs)
                # What has no graph must not get one where it is read.
                keeps_mode = torch.is_grad_enabled() or not lazy[0].requires_grad
            found = lazy[0]._derived(func, args[1:], kwargs) if keeps_mode else NotImplemented
            if found is not NotImplemented:
                return found
        unread = [each for each in lazy if each.call.whole is None]
        given: Any = tree.unflatten(
            tuple(each.whole() if isinstance(each, LazyLogits) else each for each in tensors)
        )
        versions = [version_of(each.whole()) for each in unread]
        result = func(*given[0], **given[1])
        made = flatten(result)[0]
        storages = set(map(storage_id, made))
        for each, version in zip(unread, versions, strict=True):
            whole = each.whole()
            if made and version_of(whole) == version and storage_id(whole) not in storages:
                each._whole = each.call.whole = None  # See Rule 5
        return result

    def _derived(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a function makes of it without the whole, or NotImplemented (See Rule 4)."""
        if func is F.cross_entropy:
            found = self.call.cross_entropy(self, *args, **kwargs)
            self.call.was_cut |= found is not NotImplemented
            return found
        shape, width, dtype, rows = self.shape, self.shape[-1], self.dtype, None
        kinds: set[Any] = {type(each) for each in (*args, *kwargs.values())}
        if func is Tensor.__getitem__:
            rows = self.rows[args[0]] if _is_of_rows(args[0], shape) else None
        elif func in _RESHAPES or (func in _ENTRYWISE and kinds <= {int, float, torch.dtype}):
            made = func(torch.empty(shape, dtype=dtype, device="meta"), *args, **kwargs)
            if func in _ENTRYWISE:
                rows, dtype = self.rows if made.is_floating_point() else None, made.dtype
            elif made.dtype is dtype and made.shape[-1:] == (width,):
                is_whole = math.prod(made.shape) == math.prod(shape)
                rows = self.rows.reshape(*made.shape[:-1], -1) if is_whole else None
        if rows is None:
            return NotImplemented
        own = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)  # See Rule 7
        return LazyLogits.made(self.call, rows, (*self.path, (func, own, kwargs)), width, dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise GradientError(
            f"{func} was given a tensor that is computed when it is read, past what torch offers "
            "tensors to see that. " + _WAY_OUT
        )


class _Node(torch.autograd.Function):
    """The node that made lazy logits, through which no gradient goes (See Rule 6)."""

    @staticmethod
    def forward(
        ctx: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, rows: Tensor, *_: Tensor
    ) -> Tensor:
        ctx.name, make = name, cast("Any", Tensor)._make_wrapper_subclass
        return make(LazyLogits, shape, dtype=dtype, device=rows.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GradientError(
            f"The output of {ctx.name}, which is computed when it is read, was given to an "
            "autograd function that is not torch's own, which would lose its gradient. " + _WAY_OUT
        )


def _is_of_rows(index: Any, shape: tuple[int, ...]) -> bool:
    """Whether an index picks rows, and leaves the last dimension as it is."""
    if isinstance(index, Tensor):
        return (index.dim() if index.dtype in (torch.bool, torch.uint8) else 1) < len(shape)
    parts: tuple[Any, ...] = cast("Any", index) if isinstance(index, tuple) else (index,)
    if not all(each is None or each is ... or type(each) in (int, slice) for each in parts):
        return False
    # It does so if it leaves one more entry there, too.
    wider = [torch.empty(*shape[:-1], shape[-1] + more, device="meta") for more in (0, 1)]
    return all(each[index].shape[-1:] == each.shape[-1:] for each in wider)
