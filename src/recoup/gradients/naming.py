"""Gradients by the names of their parameters, for saving and loading."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from recoup.errors import GradientError
from recoup.gradients.targets import said

__all__ = ["by_name", "by_target"]


def by_name(gradients: Mapping[Tensor, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients under the first name of each parameter of `module`."""
    names: dict[Tensor, str] = {each: name for name, each in module.named_parameters()}
    strangers = [said(each) for each in gradients if each not in names]
    if strangers:
        raise GradientError(
            f"{type(module).__name__} has no parameter that is {strangers[0]}, of which the store "
            f"holds the gradient ({len(strangers)} of this kind). Give the module that holds all "
            "of them, or pick those of this one with `filter`. Parameters that were replaced, by "
            "`load_state_dict(assign=True)` for instance, have no names any more: ask before."
        )
    return {name: gradients[each] for each, name in names.items() if each in gradients}


def by_target(
    gradients: Mapping[str, Tensor], module: nn.Module, *, strict: bool
) -> dict[Tensor, Tensor]:
    """Return the gradients by the parameters of `module` that have these names."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found: dict[Tensor, Tensor] = {}
    taken: dict[Tensor, str] = {}
    unexpected: list[str] = []
    for name, gradient in gradients.items():
        target = parameters.get(name)
        if target is None:
            unexpected.append(name)
            continue
        if target in found:
            raise GradientError(
                f"`{taken[target]}` and `{name}` are one parameter of {type(module).__name__}, and "
                "the state has a gradient of each. Add them, and leave one."
            )
        if target.shape != gradient.shape:
            raise GradientError(
                f"The gradient of `{name}` has shape {tuple(gradient.shape)}, and the parameter "
                f"{tuple(target.shape)}. Load the state of a model of the same sizes."
            )
        found[target], taken[target] = gradient, name
    if unexpected and strict:
        raise GradientError(
            f"{type(module).__name__} has no parameter {', '.join(map(repr, unexpected))}. Say "
            "strict=False to leave those out."
        )
    return found
