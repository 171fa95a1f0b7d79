"""Handing gradients to an optimizer, by its own `step`."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor

from recoup.errors import GradientError
from recoup.gradients.lent import Lent
from recoup.gradients.merging import said

__all__ = ["Missing", "Unknown", "check_can_step", "installed", "parameters_of"]

Missing = Literal["skip", "zero", "error"]
Unknown = Literal["error", "ignore"]


def parameters_of(params: Any) -> dict[Tensor, str]:
    """Return the parameters of an optimizer, or those given, and what to call each."""
    names: dict[Tensor, str] = {}
    if not hasattr(params, "param_groups"):
        return {each: said(each) for each in cast("Iterable[Tensor]", params)}
    for group in cast("list[dict[str, Any]]", params.param_groups):
        known: list[str] = group.get("param_names", [])
        for place, parameter in enumerate(cast("list[Tensor]", group["params"])):
            names[parameter] = f"`{known[place]}`" if known else said(parameter)
    return names


def check_can_step(
    optimizer: Any, targets: Collection[Tensor], missing: Missing, unknown: Unknown
) -> None:
    """Raise if a step could not do what it should."""
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


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


@contextmanager
def installed(
    gradients: Mapping[Tensor, Tensor],
    parameters: Iterable[Tensor],
    *,
    as_they_are: bool = False,
    missing: Missing = "skip",
) -> Generator[list[Tensor]]:
    """Make `.grad` of each parameter its gradient, or None where there is none.

    Args:
        gradients: what to install: moved to the device of the parameter, cast to what its
            `grad_dtype` says, in its strides.
        parameters: all whose `.grad` matters to whoever looks.
        as_they_are: install no copies, whatever the types, so that a change is seen outside.
        missing: "zero" for a zero where there is none.

    Yields:
        A list, to which the parameters are added, at the end, whose gradient was changed in place.
    """
    lending = {
        each: (
            _fitting(gradients.get(each), each, missing, as_they_are=as_they_are),
            gradients[each].dtype if as_they_are and each in gradients else None,
        )
        for each in parameters
    }
    changed: list[Tensor] = []
    with Lent(lending) as lent:
        try:
            yield changed
        finally:
            changed += lent.changed()


def _fitting(
    gradient: Tensor | None, target: Tensor, missing: Missing, *, as_they_are: bool
) -> Tensor | None:
    if gradient is None:
        wants_zero = missing == "zero" and target.requires_grad
        return torch.zeros_like(target, dtype=target.grad_dtype) if wants_zero else None
    gradient = gradient.detach()
    if as_they_are:
        return gradient
    dtype = target.grad_dtype or gradient.dtype
    gradient = gradient.to(device=target.device, dtype=dtype)
    if gradient.is_sparse or gradient.stride() == target.stride():
        return gradient
    return torch.empty_like(target, dtype=dtype).copy_(gradient)
