"""Handing gradients to an optimizer, by its own `step`."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Generator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from recoup._core.restoring import Undoing, restoring
from recoup.errors import GradientError
from recoup.gradients.lent import Lent
from recoup.gradients.targets import parameters_of, said

__all__ = ["Missing", "Unknown", "check_can_step", "installed"]

Missing = Literal["skip", "zero", "error"]
Unknown = Literal["error", "ignore"]


def check_can_step(
    optimizer: Any, targets: Collection[Tensor], missing: Missing, unknown: Unknown
) -> None:
    """Raise unless `optimizer` can step with gradients of `targets` as the arguments ask."""
    for argument, value, choices in (
        ("missing", missing, ("skip", "zero", "error")),
        ("unknown", unknown, ("error", "ignore")),
    ):
        if value not in choices:
            raise ValueError(f"`{argument}` is {value!r}, but must be one of {', '.join(choices)}.")
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"`optimizer` is a {type(optimizer).__name__}, but must have `param_groups` and `step`."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"`optimizer` is a {type(optimizer).__name__}, which evaluates the loss as often as it "
            "likes within a step (`closure`), so one gradient does not suffice. Call its `step` "
            "with a closure, or use another optimizer."
        )
    names = parameters_of(optimizer)
    _check_are_leaves(names)
    if unknown == "error":
        strangers = [said(each) for each in targets if each not in names]
        if strangers:
            raise GradientError(
                f"`optimizer` does not have {_listed(strangers)}, of which the store holds the "
                "gradient. Give those to their own optimizer (`split`), drop them (`discard`), or "
                'say unknown="ignore". After `load_state_dict(assign=True)` or wrapping, the '
                "parameters are other objects: carry a store over by `state_dict` and "
                "`load_state_dict`."
            )
    if missing == "error":
        absent = [names[each] for each in names if each not in targets and each.requires_grad]
        if absent:
            raise GradientError(
                f"The store has no gradient of {_listed(absent)}. They took no part in the loss: "
                'leave them out of the optimizer, or say missing="skip" or "zero".'
            )
    frozen = [names[each] for each in names if each in targets and not each.requires_grad]
    if frozen:
        raise GradientError(
            f"{_listed(frozen)} was frozen after its gradient had been collected, and a step would "
            "move it. Drop the gradient (`discard`), or set `requires_grad` again."
        )


def _check_are_leaves(names: Mapping[Tensor, str]) -> None:
    inner = [names[each] for each in names if not each.is_leaf]
    if inner:
        raise GradientError(
            f"{_listed(inner)} is no leaf, and `.grad` of such a tensor cannot be lent. For an "
            "optimizer with `differentiable`, set `.grad` yourself, from `store[param]`."
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


@restoring
def installed(
    gradients: Mapping[Tensor, Tensor],
    parameters: Mapping[Tensor, str],
    *,
    as_they_are: bool = False,
    missing: Missing = "skip",
) -> Generator[list[Tensor]]:
    """Set `.grad` of each parameter to its gradient, or to None where there is none.

    Args:
        gradients: the gradients to install; each is moved to the device of its parameter, cast to
            its `grad_dtype` (its own type if that is None), and laid out in its strides.
        parameters: all parameters whose `.grad` is set, with their names.
        as_they_are: install no copies, whatever the types, so that a change is seen outside.
        missing: "zero" to install zeros where there is no gradient.

    Yields:
        A list, filled at the end with the parameters whose gradient in `gradients` was
        changed in place. Kernels that do not change the version of a tensor are not seen: those
        that divide by the scale of a ``torch.amp.GradScaler``.
    """
    _check_are_leaves(parameters)
    lending: dict[Tensor, tuple[Tensor | None, torch.dtype | None]] = {}
    copied: set[Tensor] = set()
    for each in parameters:
        gradient = gradients.get(each)
        if gradient is None:
            lending[each] = (_absent(each, missing), None)
            continue
        has_graph = gradient.requires_grad
        gradient = gradient.detach()
        fitting = gradient if as_they_are else _fitting(gradient, each)
        if has_graph and fitting is gradient:
            fitting = gradient.clone()  # the graph needs it, and two parameters may share it
        if fitting is not gradient:
            copied.add(each)
        lending[each] = (fitting, gradient.dtype if as_they_are else None)
    changed: list[Tensor] = []
    with Lent(lending) as lent, Undoing() as undo:
        undo.later(_note_changed, changed, lent, gradients, copied)
        yield changed


def _note_changed(
    changed: list[Tensor], lent: Lent, gradients: Mapping[Tensor, Tensor], copied: set[Tensor]
) -> None:
    changed[:] = [each for each in lent.changed() if each in gradients and each not in copied]


def _absent(target: Tensor, missing: Missing) -> Tensor | None:
    wants_zero = missing == "zero" and target.requires_grad
    return torch.zeros_like(target, dtype=target.grad_dtype) if wants_zero else None


def _fitting(gradient: Tensor, target: Tensor) -> Tensor:
    dtype = target.grad_dtype or target.dtype  # None allows any type, but not every optimizer does
    gradient = gradient.to(device=target.device, dtype=dtype)
    if gradient.is_sparse or gradient.stride() == target.stride():
        return gradient
    return torch.empty_like(target, dtype=dtype).copy_(gradient)
