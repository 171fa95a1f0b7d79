"""Matching the parameters of a tree by a pattern, and checking that they can be reparametrized."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.nn.parameter import is_lazy

from recoup.weights.parametrized_module import attached_to
from recoup.weights.reparametrization import Reparametrization

__all__ = [
    "Named",
    "check",
    "check_is_module",
    "check_types",
    "has_forward",
    "matching",
    "named",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Named(NamedTuple):
    """A parameter by its qualified name, and by its name in the module that owns it."""

    name: str
    owner: nn.Module
    key: str
    parameter: nn.Parameter


def matching(module: nn.Module, pattern: str) -> list[Named]:
    """Return the parameters that `pattern` matches, those of a shared module once."""
    check_is_module(module)
    try:
        matches = re.compile(pattern).fullmatch
        matches("")  # a pattern of bytes compiles, too
    except (re.error, TypeError) as error:
        raise ValueError(
            f"`pattern` is {pattern!r}, but must be a regular expression: {error}."
        ) from None
    candidates = list(named(module))
    found: dict[tuple[int, str], Named] = {}
    for each in candidates:
        if matches(each.name):
            found.setdefault((id(each.owner), each.key), each)
    if not found:
        names = ", ".join(each.name for each in candidates[:8]) or "none"
        more = ", ..." if len(candidates) > 8 else ""
        raise ValueError(
            f"`pattern` {pattern!r} matches no parameter of {type(module).__name__}. It must match "
            f"the whole of a qualified name; there are: {names}{more}"
        )
    return list(found.values())


def named(module: nn.Module) -> Iterator[Named]:
    """Yield the parameters of a tree, each under all of its names."""
    named_modules = cast("Any", module.named_modules)  # torch's annotation is incomplete
    modules: Iterator[tuple[str, nn.Module]] = named_modules(remove_duplicate=False)
    for prefix, owner in modules:
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                yield Named(f"{prefix}.{key}" if prefix else key, owner, key, parameter)


def check_is_module(module: object) -> None:
    """Raise if `module` is not a module."""
    if not isinstance(module, nn.Module):
        got = module.__name__ if isinstance(module, type) else type(module).__name__
        raise ValueError(f"`module` is {got}, but must be an nn.Module (an instance, not a class).")


def has_forward(module: nn.Module) -> bool:
    """Whether `module` has a forward of its class that runs when it is called."""
    return type(module).forward is not nn.Module.forward and "forward" not in vars(module)


def check(step: Reparametrization, each: Named, module: nn.Module) -> None:
    """Raise if `step` cannot be applied to a parameter of the tree `module`."""
    _check_parameter(step, each)
    for part in (module, each.owner):
        _check_class(part)
    if isinstance(module, NonDynamicallyQuantizableLinear):
        raise ValueError(
            "`module` is the projection of a MultiheadAttention, which reads its weight and never "
            'calls it. Apply to the attention: pattern "out_proj.weight".'
        )
    if step.changes_weight and any(isinstance(part, Ddp) for part in module.modules()):
        raise ValueError(
            f"{step.kind} adds a parameter to `{each.name}`, which DistributedDataParallel would "
            "not reduce. Apply it before you wrap the model."
        )
    hooks = cast("dict[int, Any]", each.owner._forward_pre_hooks)
    for hook in hooks.values():
        if type(hook).__module__.startswith("torch.nn.utils."):
            raise ValueError(
                f"`{each.name}` is read by a hook ({type(hook).__name__}) before the forward, "
                "which would not see the noise. Remove that first; recoup.weight_norm stands for "
                "torch.nn.utils.weight_norm."
            )
    attached = attached_to(each.owner)
    weight = None if attached is None else attached.weights.get(each.key)
    for other in () if weight is None else weight.steps:
        if other.kind == step.kind:
            raise ValueError(
                f"`{each.name}` has {other!r} already. Change what that was given (a 0-dim tensor, "
                "or a function of the step), or call recoup.weights.remove first."
            )


def check_types(kind: str, pattern: str, found: list[Named]) -> None:
    """Raise if parameters have an unsupported type, and suggest a pattern that leaves them out."""
    others = [each for each in found if each.parameter.dtype not in _DTYPES]
    if not others:
        return
    names = "|".join(re.escape(each.name) for each in others)
    text = pattern if type(pattern) is str else ".*"
    way_out = f"Leave it out with pattern=r'(?!({names})$)({text})'."
    if len(others) == len(found):
        way_out = "Choose a `pattern` that matches floating-point parameters."
    raise ValueError(
        f"`{others[0].name}` is {others[0].parameter.dtype}, and {kind} needs a floating-point "
        f"type of 16 bits or more. {way_out}"
    )


def _check_parameter(step: Reparametrization, each: Named) -> None:
    if is_lazy(each.parameter):
        raise ValueError(
            f"`{each.name}` is an uninitialized parameter without a shape. Run a batch through its "
            f"{type(each.owner).__name__} first."
        )


def _check_class(module: nn.Module) -> None:
    if "forward" in vars(module):
        raise ValueError(
            f"`module` has a {type(module).__name__} whose `forward` was replaced on the instance "
            "(a compiled or hooked module), so recoup cannot extend it. Apply this before "
            "`forward` is replaced."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            "`module` contains a ScriptModule, which recoup cannot extend. Apply this before "
            "scripting."
        )
