"""The contract of invertible modules, that of layers of other libraries, and shapes of both.

NOTE [ Layers of other libraries ]

Rule 1. Only layers whose inverse is known to be cheap and exact are inverted; others are recomputed
        from their kept inputs. That is known of classes, and of no subclass of them: it may do
        anything.
Rule 2. A coupling evaluates its networks on the same inputs in both directions, so that these are
        shared (NOTE [ One evaluation ]).
Rule 3. Layers may start from their first batch, and note that in a buffer, which a second run would
        find as it was before. So a chain lets all of them start before its first run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from recoup._arguments import check_real, check_type, is_whole, shown
from recoup._core.shared_evaluation import evaluate, lending

_NOT_SHOWN = ("training", "takes_context", "inverts_in_backward")  # in the repr of a module


class InvertibleModule(nn.Module):
    """A module whose input can be computed from its output.

    `forward` maps data to latent and `inverse` latent to data; direction is never a flag. Both
    return the log-determinant of their own Jacobian, one number a sample, so that for
    ``y, log_det = f(x)`` and ``x, back = f.inverse(y)`` the sum ``log_det + back`` is 0.

    In a `Chain` with ``memory="constant"`` nothing of the module is kept: backward computes the
    input from the output with `inverse`, and runs `forward` once more for its residuals.
    `recoup.invertible.check_invertible` tests a module of your own.

    Example:
        >>> import torch
        >>> from recoup.invertible import InvertibleModule, check_invertible
        >>> class Negate(InvertibleModule):
        ...     def forward(self, x):
        ...         return -x, x.new_zeros(len(x))
        ...
        ...     def inverse(self, y):
        ...         return -y, y.new_zeros(len(y))
        >>> bool(check_invertible(Negate(), torch.ones(3, 4)))
        True
    """

    returns_log_det: ClassVar[bool] = True
    # Whether `inverse` is defined, cheap and exact enough for backward; else backward recomputes.
    inverts_in_backward: bool = True
    # Number of latents that `forward` splits off; it returns them in a tuple, the rest last.
    num_early: int = 0
    # Whether both directions take a second argument, the context (a tensor or None).
    takes_context: bool = False

    def forward(self, x: Tensor, /) -> tuple[Any, Tensor]:
        """Map data to latent: ``x`` of shape ``(N, ...)`` to ``(y, log_det)``, ``(N,)``."""
        raise NotImplementedError(f"{type(self).__name__} does not define `forward`.")

    def inverse(self, y: Any, /) -> tuple[Tensor, Tensor]:
        """Map latent to data: ``y`` to ``(x, log_det)``, ``log_det`` of shape ``(N,)``."""
        raise NotImplementedError(f"{type(self).__name__} does not define `inverse`.")

    cast("Any", inverse).is_missing = True  # inherited by a subclass that does not define one
    cast("Any", forward).is_missing = True

    def evaluate(
        self, network: nn.Module, *inputs: Tensor, then: Callable[[Any], Any] | None = None
    ) -> Any:
        """Call `network` so that forward, inverse and backward share one evaluation.

        In constant memory the inverse that backward runs also produces the residuals of `network`,
        which so runs once in forward and once in backward. Its random layers draw from a seed of
        their own, in every memory mode. A network that is called directly gives the same results,
        but runs twice in backward.

        Args:
            network: The network.
            inputs: Its inputs.
            then: Computes from the output of the network what both directions need of it (the
                scales of a coupling), so that this is evaluated once, too. It may read parameters
                and buffers beside that output, but no other tensors: those may differ.

        Returns:
            What `then` returns; without it, what `network` returns.
        """
        return evaluate(network, inputs, then)

    def extra_repr(self) -> str:
        """Show the numbers and words with which the layer was made."""
        return ", ".join(
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if isinstance(value, bool | int | float | str | tuple)
            and not name.startswith("_")
            and name not in _NOT_SHOWN
        )


class Adapted(InvertibleModule):
    """The base of adapters: a layer of another library, which stays the object that it is.

    Both directions evaluate its `networks` on the same inputs (See Rule 2). `why_not` says why
    backward does not invert the layer; it is empty if backward does (See Rule 1).
    """

    takes_context = True

    def __init__(
        self, transform: Any, networks: Iterable[nn.Module] = (), why_not: str = ""
    ) -> None:
        super().__init__()
        self.transform = transform
        self.why_not = why_not
        self._started: set[bool] = set()  # the modes in which it has started (See Rule 3)
        self._networks = () if why_not else tuple(dict.fromkeys(networks))

    @property
    def inverts_in_backward(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether backward inverts the layer; if not, `repr` says why."""
        return not self.why_not

    @property
    def is_light(self) -> bool:
        """Whether backward inverts the layer, and it has no networks."""
        return not self.why_not and not self._networks

    @property
    def has_started(self) -> bool:
        """Whether the layer has seen a batch in the mode that it is in (See Rule 3)."""
        return getattr(self.transform, "training", True) in self._started

    def has_seen_a_batch(self) -> None:
        self._started.add(getattr(self.transform, "training", True))

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with lending(self._networks):
            return _pair(*self._run(x, context, back=False), x)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with lending(self._networks):
            return _pair(*self._run(y, context, back=True), y)

    def input_of(self, y: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the value of `inverse` alone: backward has no use for the log-determinant."""
        with lending(self._networks):
            return self._input_of(y, context)

    def _run(self, x: Tensor, context: Tensor | None, *, back: bool) -> tuple[Tensor, Any]:
        """Return the value and the log-determinant, of any shape, in one direction."""
        raise NotImplementedError

    def _input_of(self, y: Tensor, context: Tensor | None) -> Tensor:
        return self._run(y, context, back=True)[0]

    def extra_repr(self) -> str:
        return f"recomputed: {self.why_not}" if self.why_not else "inverted"


class Backwards(Adapted):
    """A layer of another chain from latent to data, for flows that are trained on their samples."""

    def __init__(self, layer: InvertibleModule) -> None:
        networks: Sequence[nn.Module] = getattr(layer, "_networks", ())
        why_not = "" if layer.inverts_in_backward else "backward does not invert it"
        super().__init__(layer, networks, getattr(layer, "why_not", why_not))
        self.takes_context = layer.takes_context

    @property
    def has_started(self) -> bool:
        return getattr(self.transform, "has_started", True)

    def _run(self, x: Tensor, context: Tensor | None, *, back: bool) -> tuple[Tensor, Any]:
        layer = self.transform if back else self.transform.inverse
        return layer(x) if context is None else layer(x, context)


def _pair(value: Tensor, log_det: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a value and its log-determinant, ``(N,)``: libraries return other shapes, too."""
    num = len(like)
    if not isinstance(log_det, Tensor):
        return value, value.new_full((num,), log_det)
    if log_det.dim() > 1:
        log_det = log_det.flatten(1).sum(1)
    return value, log_det if log_det.shape == (num,) else log_det.expand(num)


def check_within(low: float, high: float, usual: float, **given: float) -> None:
    """Raise ValueError unless each argument is above `low` and below `high`."""
    check_real(**given)
    for name, value in given.items():
        if not low < value < high:
            most = "" if high == math.inf else f" and below {high:g}"
            needed = f"above {low:g}{most}; {usual:g} is usual"
            raise ValueError(f"`{name}` is {value}, but must be {needed}.")


def sizes_of(shape: Any) -> torch.Size:
    """Return `shape` as a size, or raise ValueError unless it holds sizes of at least 1."""
    sizes: Sequence[int] = cast("Any", shape) if isinstance(shape, list | tuple) else ()
    if not sizes or not all(is_whole(size) for size in sizes):
        raise ValueError(
            f"`shape` is {shown(cast('object', shape))}, but must hold at least one size, each at "
            "least 1."
        )
    return torch.Size(sizes)


def num_positions(x: Tensor) -> int:
    """Count the positions that share one channel: ``H * W`` for images, 1 for vectors."""
    return math.prod(x.shape[2:])


def at_each_position(log_det: Tensor, x: Tensor) -> Tensor:
    """Return the log-determinant ``(N,)`` of a map with `log_det` at each position of `x`."""
    return (log_det * num_positions(x)).expand(x.shape[0])


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """View `values` of shape ``(C,)`` so that it broadcasts over `x` of shape ``(N, C, ...)``."""
    return values.view(1, -1, *(1,) * (x.dim() - 2))


def per_sample(values: Tensor) -> Tensor:
    """Sum `values` of shape ``(N, ...)`` over all but the batch, to ``(N,)``."""
    return values.sum(tuple(range(1, values.dim())))


def zero_log_det(x: Tensor) -> Tensor:
    """Return the log-determinant of a map that preserves volume: zeros of shape ``(N,)``."""
    return x.new_zeros(x.shape[0])


def as_tuple(y: Any, name: str = "y") -> tuple[Tensor, ...]:
    """Return what a chain returned as a tuple, even if it is one tensor."""
    parts = cast("Sequence[Any]", y if isinstance(y, tuple | list) and y else (y,))
    named = {f"{name}[{at}]" if len(parts) > 1 else name: part for at, part in enumerate(parts)}
    check_type(Tensor, "a tensor, or a tuple of them, as `forward` returns it", **named)
    return tuple(parts)


def got(x: Any, name: str = "x") -> str:
    """Return what errors say of a value that was to be a tensor of another shape."""
    is_tensor = isinstance(x, Tensor)
    return f"`{name}` has shape {tuple(x.shape)}" if is_tensor else f"`{name}` is {shown(x)}"


def check_channels(x: Any, num_channels: int) -> None:
    """Raise ValueError unless `x` is a tensor of shape ``(N, num_channels, ...)``."""
    if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[1] != num_channels:
        raise ValueError(
            f"{got(x)}, but this layer needs a tensor (N, {num_channels}, ...). "
            "Build the layer with `num_channels` equal to the size of dimension 1."
        )


def check_has_channels(x: Any, least: int, layer: str, way_out: str) -> None:
    """Raise ValueError unless `x` is a tensor of shape ``(N, C, ...)`` with so many channels."""
    if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[1] < least:
        needed = "(N, C, ...)" + (f" with C of at least {least}" if least else "")
        raise ValueError(f"{got(x)}, but {layer} needs {needed}. {way_out}")


def names_of(value: object) -> list[str]:
    """Return the names of the classes of an object, its own first, each with its module."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__]


def runs_as(value: object) -> str:
    """Return the name of the class that defines how an object runs: its own, or a base of it."""
    kinds = zip(type(value).__mro__, names_of(value), strict=True)
    runs = ("forward", "_call", "__call__", "log_prob")
    return next((name for kind, name in kinds if not vars(kind).keys().isdisjoint(runs)), "")
