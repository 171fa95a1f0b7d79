"""Checking that the parameters of a tree can be reparametrized."""

from __future__ import annotations

import weakref
from typing import Any, cast

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.nn.parameter import is_lazy

from recoup._core.stand_ins import check_has_own_forward
from recoup.weights.matching import DTYPES, Named
from recoup.weights.parametrized_module import attached_to
from recoup.weights.reparametrization import Reparametrization

__all__ = ["check", "check_types", "has_forward", "note_sharing"]


def has_forward(module: nn.Module) -> bool:
    """Whether `module` has a forward of its class that runs when it is called."""
    return type(module).forward is not nn.Module.forward and "forward" not in vars(module)


_sharing: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]]
_sharing = weakref.WeakKeyDictionary()  # the modules that have the same parameters, by each of them


def note_sharing(module: nn.Module, other: nn.Module) -> None:
    """Note that two modules have their dictionaries of parameters in common."""
    _sharing.setdefault(module, weakref.WeakSet()).add(other)
    _sharing.setdefault(other, weakref.WeakSet()).add(module)


def check(step: Reparametrization, each: Named, module: nn.Module) -> None:
    """Raise if `step` cannot be applied to a parameter of the tree `module`."""
    _check_parameter(step, each)
    for part in (module, each.owner):
        check_has_own_forward(part)
    if isinstance(module, NonDynamicallyQuantizableLinear):
        raise ValueError(
            "`module` is the projection of a MultiheadAttention, which reads its weight and never "
            'calls it. Apply to the attention: pattern "out_proj.weight".'
        )
    if step.adds_parameters and any(isinstance(part, Ddp) for part in module.modules()):
        raise ValueError(
            f"{step.kind} adds a parameter to `{each.name}`, which DistributedDataParallel would "
            "not reduce. Apply it before you wrap the model."
        )
    if step.adds_parameters and _sharing.get(each.owner):
        raise ValueError(
            f"{step.kind} adds a parameter to `{each.name}`, which a twin of the model "
            "(recoup.weights.twin) would not use. Apply it before you make the twin."
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
        if step.is_same_as(other):
            raise ValueError(
                f"`{each.name}` has {other!r} already. Change what that was given (a 0-dim tensor, "
                "or a function of the step), or call recoup.weights.remove first."
            )


def check_types(kind: str, found: list[Named]) -> None:
    """Raise if a parameter has an unsupported type."""
    for each in found:
        if each.parameter.dtype not in DTYPES:
            raise ValueError(
                f"`{each.name}` is {each.parameter.dtype}, and {kind} needs a floating-point type "
                "of 16 bits or more. Leave it out, or choose by a pattern, which leaves out what "
                "has another type."
            )


def _check_parameter(step: Reparametrization, each: Named) -> None:
    if is_lazy(each.parameter):
        raise ValueError(
            f"`{each.name}` is an uninitialized parameter without a shape. Run a batch through its "
            f"{type(each.owner).__name__} first."
        )
