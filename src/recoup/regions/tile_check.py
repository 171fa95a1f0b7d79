"""A comparison of a function in tiles with the function at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recoup._core.generators import generators_restored
from recoup._core.graph_ends import ends_of
from recoup._core.pytree import flatten, flatten_arguments
from recoup._core.saved_tensors import as_leaves, grad_mode

__all__ = ["check_rows"]

Named = list[tuple[str, Tensor | None]]


def check_rows(
    name: str,
    fn: Callable[..., Any],
    in_tiles: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise ValueError if `in_tiles` differs from `fn` in outputs or gradients.

    Args:
        name: the name of `fn` in error messages.
        fn: the function.
        in_tiles: the function in tiles.
        args: the arguments.
        kwargs: the keyword arguments.
    """
    wanted = _step(fn, args, kwargs)
    found = _step(in_tiles, args, kwargs)
    if len(found) != len(wanted):
        raise ValueError(f"`fn` ({name}) uses other parameters in tiles than at once.")
    for (what, got), (_, want) in zip(found, wanted, strict=True):
        error = _error(got, want)
        if not error <= 1:
            raise ValueError(
                f"`fn` ({name}) does not treat rows independently, or it draws: {what} in tiles "
                f"differs from the one at once by {error:.3g} times what rounding explains. Do not "
                "tile it, give another `dim`, say in `split` which arguments have the rows, or "
                "call `.eval()` if there is dropout."
            )


def _step(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Named:
    """Return the outputs of a call and the gradients of its arguments and parameters."""
    tensors, tree = flatten_arguments(args, kwargs)
    own = as_leaves(tensors, [_has_gradient(t) for t in tensors])
    given: Any = tree.unflatten(own)
    with generators_restored(), grad_mode(is_enabled=True):
        output = fn(*given) if tree.is_flat else fn(*given[0], **given[1])
        outputs = flatten(output)[0]
        found: Named = [(f"output {i}", t.detach()) for i, t in enumerate(outputs)]
        ends = [t for t in outputs if t.requires_grad]
        if not ends:
            return found
        asked = [t for t in own if t.requires_grad]
        ids = set(map(id, asked))
        leaves = [t for t in ends_of(ends).leaves if id(t) not in ids]
        leaves.sort(key=id)
        gradients = torch.autograd.grad(
            ends, [*asked, *leaves], _cotangents(ends), allow_unused=True
        )
    names = [f"the gradient of argument tensor {i}" for i in range(len(asked))]
    names += [f"the gradient of a parameter of shape {tuple(t.shape)}" for t in leaves]
    return [*found, *zip(names, gradients, strict=True)]


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _cotangents(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return a gradient of each output that differs from row to row."""
    found: list[Tensor] = []
    for output in outputs:
        places = torch.arange(output.numel(), device=output.device, dtype=torch.float64)
        found.append((1 + (places * 0.7 + 0.3).sin()).to(output.dtype).view(output.shape))
    return found


def _error(got: Tensor | None, want: Tensor | None) -> float:
    """Return the difference of two tensors, in units of what rounding explains."""
    if got is None or want is None:
        other = got if want is None else want
        return 0.0 if other is None or not other.any() else float("inf")
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not _has_gradient(got):
        return 0.0 if torch.equal(got, want) else float("inf")
    if torch.equal(got.isnan(), want.isnan()):
        got, want = got.nan_to_num(), want.nan_to_num()
    allowed = torch.finfo(got.dtype).eps ** 0.5 * float(want.abs().max() if want.numel() else 0)
    difference = float((got - want).abs().max()) if want.numel() else 0.0
    return difference / allowed if allowed else (0.0 if difference == 0 else float("inf"))
